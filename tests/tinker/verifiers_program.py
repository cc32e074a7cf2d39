"""The recipe verifiers_rl of tinker-cookbook 0.6.1, whose rollouts do not take the argument `termination` that the
package's own trainer gives them: it is left out here, and nothing else is changed."""

import runpy
import types

from tinker_cookbook.rl import rollouts


class Lenient(types.ModuleType):
    def __setattr__(self, name, value):
        own = value

        async def without_termination(*given, termination=None, **named):
            return await own(*given, **named)

        super().__setattr__(name, without_termination if name == "do_group_rollout" else value)


rollouts.__class__ = Lenient
runpy.run_module("tinker_cookbook.recipes.verifiers_rl.train", run_name="__main__", alter_sys=True)
