"""The configuration: all options, the loader, and its error messages. Imports no torch.

section           the base class of sections, and types of options
sections          all options except those of losses, each with its default and meaning
losses            the options of losses
schema            the whole configuration, and rules for options that contradict each other
load              makes a `Config` from a YAML file and overrides from the command line
yaml_tree         reads YAML with the line of every option
presets           published recipes as sets of options
custom            imports users' own functions and classes, and checks their options
foreign           translates option names of other trainers in error messages
describe          `--help`, docs/configuration.md and the types in error messages
"""
