"""The configuration: every option, how it is read, and what is said when it is wrong. Imports no torch.

sections, losses  the options, each with its default and meaning; section: their base class
schema            the whole configuration, and options that contradict each other
load              a YAML file and the command line's overrides become a `Config`; yaml_tree: the line of every option
presets           published recipes, as options to fill in
foreign           the names of other trainers' options, answered with ours
explain           the objective as formulas (`--explain`)
describe          `--help`, docs/configuration.md and the types in error messages
"""
