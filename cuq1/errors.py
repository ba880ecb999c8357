"""The exceptions a user may meet.

Every message is one sentence that names the thing at fault and what to do
about it; command lines print it alone and exit with status 2.
"""


class Cuq1Error(Exception):
    """Base of every error that input, and not a defect in cuq1, can cause."""


class ConfigError(Cuq1Error):
    """A config.json that is malformed, or describes something cuq1 does not compute."""


class CheckpointError(Cuq1Error):
    """A checkpoint that is missing, damaged, incomplete or holds unknown tensors."""


class TextError(Cuq1Error):
    """A tokenizer, chat template, message list or tool list that cannot be used."""


class RequestError(Cuq1Error):
    """Generation parameters or a prompt outside what the model can serve."""


class DeviceError(Cuq1Error):
    """The requested device, or enough memory on it, is not available."""


class PeerError(DeviceError):
    """Another rank's part of an exchange never came: that rank's fault, or the fault of one that it waited for itself.

    place: the exchange's number in the order of one round's; after: those that may come next.
    """

    def __init__(self, message: str, place: int, after: tuple[int, ...]) -> None:
        super().__init__(message)
        self.place = place
        self.after = after


class LaunchError(Cuq1Error):
    """A run of several processes that cannot start, or in which a rank failed or never arrived."""
