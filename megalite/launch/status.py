"""`run_status.json`: how a run ended, for whoever has started it and may start it again.

torchrun ends with 1 whatever its ranks ended with, so that the exit code cannot say it. The file is there once the run
has ended, is removed when it begins, and is missing where everything was killed at once.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megalite.errors import MegaliteError

NAME = "run_status.json"


@dataclass(frozen=True)
class Status:
    """How a run ended.

    code: the exit code, as in docs/exit-codes.md   rank: whose fault it is, None where no rank's   step: steps done
    attempt: how often torchrun had restarted it   retryable: whether starting it again, with nothing changed, may help
    """

    code: int
    rank: int | None
    step: int | None
    attempt: int
    message: str
    retryable: bool

    @classmethod
    def of(cls, error: MegaliteError, attempt: int = 0) -> Status:
        """What an error says of itself."""
        return cls(error.exit_code, error.rank, error.step, attempt, str(error), error.retryable)

    def error(self) -> MegaliteError:
        """The error again."""
        error = MegaliteError(self.message)
        error.exit_code, error.rank, error.step, error.retryable = self.code, self.rank, self.step, self.retryable
        return error


def write(folder: Path, status: Status) -> None:
    """Write it in the run's folder, all or nothing; where there is no folder, no run has begun, and nothing is written.

    That it cannot be written shall not hide how the run ended: no error is raised.
    """
    if not folder.is_dir():
        return
    partial = folder / f".{NAME}.{os.getpid()}"
    with suppress(OSError):
        partial.write_text(json.dumps(asdict(status), ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(partial, folder / NAME)
        return
    with suppress(OSError):
        partial.unlink()


def clear(folder: Path) -> None:
    """Remove what an earlier run has left."""
    with suppress(OSError):
        (folder / NAME).unlink()
