"""What a user can get wrong, as exceptions: one line each, and the exit code that says whose turn it is.

Raised by config, data, checkpoint, train and launch, and by what reads Hugging Face's models; `parallel` and all else
of `model` are libraries and raise `ValueError`.
"""


class MegaliteError(Exception):
    """A mistake or a state of the world that one line explains; the command line prints it without a stack trace."""

    exit_code = 70  # os.EX_SOFTWARE
    retryable = False  # whether starting again, with nothing changed, may help
    rank: int | None = None  # whose it is, where it is one rank's
    step: int | None = None  # steps that were done by then


class ConfigError(MegaliteError):
    """A setting that cannot work: names the setting, what was given, what would do."""

    exit_code = 78  # os.EX_CONFIG


class DataError(MegaliteError):
    """Training data that is missing, damaged or does not fit the model: names the file."""

    exit_code = 65  # os.EX_DATAERR


class NumericError(MegaliteError):
    """The loss or the gradient stopped being a number: names the step and the rank."""

    exit_code = 79  # the first code that sysexits.h leaves free


class CheckpointError(MegaliteError):
    """A checkpoint that is missing, damaged or of another model: names the file and the tensor."""

    exit_code = 66  # os.EX_NOINPUT


class PathRefused(CheckpointError):
    """A name in a checkpoint, or a link, that leads out of its folder."""

    exit_code = 77  # os.EX_NOPERM


class SaveError(MegaliteError):
    """A checkpoint that cannot be written: names the path and the bytes that are free."""

    exit_code = 73  # os.EX_CANTCREAT


class RankLost(MegaliteError):
    """A rank ended without a word, or hangs: names it, its step, and what the others wait for."""

    exit_code = 69  # os.EX_UNAVAILABLE
    retryable = True
    seen = False  # its process was seen to end; otherwise other ranks miss it


class MeshMismatch(MegaliteError):
    """Ranks of one run that were started with different settings, code or data: names key, values and ranks."""

    exit_code = 76  # os.EX_PROTOCOL


class Preempted(MegaliteError):
    """SIGTERM came, and the run has left after a whole step: it may be started again and goes on there."""

    exit_code = 75  # os.EX_TEMPFAIL
    retryable = True
