"""Any stage inside vLLM: `EPMOE_STAGE=02_fixed_capacity vllm serve MODEL` runs the routed experts on that stage.

vLLM imports this module and calls `register` in every process that it starts (entry point `vllm.general_plugins`).
What an import raises, vLLM logs and forgets; what `register` raises, ends the process. So nothing happens here but
definitions, and everything that can be wrong is found out in `register`.
"""


def register() -> None:
    """Install the stage that EPMOE_STAGE names; without it, or with `native`, vLLM stays as it is.

    Raises:
        InputError: no such stage, or a variable whose name is a slip of ours.
        UnsupportedError: this vLLM is not one that the plugin knows, or another plugin holds the hook.
    """
    from epmoe.vllm_plugin import settings

    wanted = settings.read()
    if wanted is None:
        return
    from epmoe.vllm_plugin import hook

    hook.install(wanted)
