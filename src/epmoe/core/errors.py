"""The one error hierarchy.

Bad input is a `ValueError` that names the value, the limit and the fix, and is raised before any communication.
What only one rank can see (too many tokens, a wrong dtype) becomes the same error on every rank: see `agreement`.
"""


class EpmoeError(Exception):
    """Everything that this project raises on purpose."""


class InputError(EpmoeError, ValueError):
    """An argument is wrong: a shape, a dtype, an id, a name. The message names the value, the limit and the fix."""


class CapacityError(InputError):
    """More tokens on a rank than the layer was built for (`max_tokens_per_rank`)."""


class DisagreementError(InputError):
    """Ranks called the same layer with arguments that must be equal and are not."""


class UnsupportedError(InputError):
    """A stage cannot do what was asked here (device, dtype, transport, placement). The message lists every reason."""


class ContractError(InputError):
    """A part of a split layer broke a promise of `epmoe.core.contract`. The message names the promise."""


class NotCapturableError(EpmoeError, RuntimeError):
    """A stage that waits for the host was called while a CUDA graph was being captured."""


class RankFailedError(EpmoeError, RuntimeError):
    """A rank died, or raised something that could not be brought home."""


class RunTimeoutError(EpmoeError, TimeoutError):
    """A run on several ranks did not end within its time limit."""
