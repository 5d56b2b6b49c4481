"""A run's checkpoints: when its state is kept, from where it goes on, and what must be as it was.

    resume ─▶ step, step, ... ─▶ after(done) ─▶ ... ─▶ after(last)

A save that was begun is committed at the end of the first step at which no rank writes any more. What a run leaves in
its folder is of one sequence of steps: where it begins anew, or goes on from elsewhere, what was there is put aside in
`earlier-N`, and never deleted.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import megalite
from megalite import errors
from megalite.checkpoint import folder
from megalite.checkpoint.saver import Saver
from megalite.config import Config
from megalite.data import TokenFile
from megalite.data.ledger import FOLDER as SAMPLES
from megalite.data.ledger import begin_attempt
from megalite.errors import CheckpointError, ConfigError, DataError, Preempted, SaveError
from megalite.parallel.words import first_of, said
from megalite.train.control import Control, Heard, Saving
from megalite.train.state import held, numbers, restore
from megalite.train.step import TrainStep

CHECKPOINTS = "checkpoints"
OF_A_RUN = CHECKPOINTS, SAMPLES, "metrics.jsonl", "metrics-superseded.jsonl", "timeline.json"
# Settings that may be others than the checkpoint's; of the rest of these sections a difference is another run.
FREE = {
    "model": {"preset", "init", "max_seq_len", "init_std"},
    "data": {"paths", "corpus"},
    "train": {
        *{"steps", "micro_batch", "dtype", "recompute", "recompute_every", "offload_activations", "z_loss"},
        *{"validate_every", "validation_batches", "sample_tokens", "sample_prompt"},
    },
}


@dataclass(frozen=True)
class Start:
    """Where a run begins: after `done` steps and `tokens` tokens; attempt: how often it has begun, this included."""

    done: int = 0
    tokens: int = 0
    attempt: int = 1


class Checkpoints:
    """Of one run. data: what it trains on   heard: signals of this rank   say: tells the user a line, on rank 0"""

    def __init__(
        self,
        config: Config,
        step: TrainStep,
        data: Sequence[TokenFile],
        heard: Heard | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.config, self.step, self.world, self.say = config, step, step.mesh.world, say
        self.data = [{"tokens": len(file), "vocab_size": file.vocab_size} for file in data]
        self.run = Path(config.run.dir)
        self.root = self.run / CHECKPOINTS
        self.saver = Saver(self.root, self.world, asynchronous=config.checkpoint.asynchronous)
        self._waited = 0.0  # seconds, for the save that was begun
        step.optimizer.register_step_pre_hook(self._settle)
        self.control = Control(self.world, step.pipelined.device, heard)

    # --- at the beginning -----------------------------------------------------------------------------------------

    def resume(self, restarted: bool = False) -> Start:
        """Fill model and optimizer as `checkpoint.resume` says. restarted: the run goes on whatever that says

        All ranks call it, and all raise: CheckpointError where no checkpoint is usable and one should be, ConfigError
        and DataError where it is of another model or of other data.
        """
        chosen = self._first_rank(lambda: [str(path) for path in self._candidates(restarted)])
        refused: list[str] = []
        for path in map(Path, chosen):
            try:
                state = self._load(path)
            except CheckpointError as error:
                refused.append(str(error))
                continue
            for passed in refused:
                self._tell(f"passed over: {passed}")
            return self._begin(path, state["step"], state["tokens"])
        if refused:
            raise CheckpointError(refused[0])
        return self._begin(None, 0, 0)

    def _candidates(self, restarted: bool) -> list[Path]:
        """On rank 0, the checkpoints to begin from, the best first, each with every file in its place."""
        asked = self.config.checkpoint.resume
        folder.clean(self.root)
        if asked == "never" and not restarted:
            put_aside(self.run)
            return []
        own = restarted or asked == "auto"
        given = self.run if own else Path(asked)
        if not own and not (given / CHECKPOINTS).is_dir():
            return [folder.checked(given).path]
        root = given / CHECKPOINTS
        found, damaged = [], []
        for step in folder.steps(root):
            try:
                found.append(folder.checked(root / folder.name_of(step)).path)
            except CheckpointError as error:
                damaged.append(error)
                self._tell(f"passed over: {error}")
        if not found and (damaged or not own):
            raise CheckpointError(
                f"{root}: no checkpoint that can be used{f': {damaged[0]}' if damaged else ''}; another folder as "
                "checkpoint.resume would do, or 'never' to begin anew"
            )
        return found

    def _load(self, path: Path) -> dict[str, Any]:
        """Everything from a checkpoint, and what its state.json says; raises on all ranks where it does on one."""
        error, checkpoint = "", None
        try:
            checkpoint = folder.read(path)
        except CheckpointError as caught:
            error = str(caught)
        error = first_of(error, self.world)
        if checkpoint is None or error:
            raise CheckpointError(error)
        try:
            self._compare(path, checkpoint.state)
            int(checkpoint.state["tokens"])
        except (KeyError, TypeError, ValueError, AttributeError) as missing:
            raise CheckpointError(f"{path / folder.STATE}: not what a run of megalite keeps: {missing!r}") from None
        restore(self.step, checkpoint)
        return checkpoint.state

    def _compare(self, path: Path, state: dict[str, Any]) -> None:
        """ConfigError or DataError where the run would go on as another."""
        now = json.loads(json.dumps(asdict(self.config)))
        fixed = [(section, key) for section, free in FREE.items() for key in now[section] if key not in free]
        for section, key in [*fixed, ("optimizer", "name")]:
            given = now[section][key]
            there = state["config"][section].get(key, given)
            if given != there:
                raise ConfigError(
                    f"{section}.{key}: {given!r} given; {there!r} would do, as {path} has, or another run.dir, or "
                    "checkpoint.resume='never' to begin anew"
                )
        if state["data"] != self.data:
            raise DataError(f"data.paths: {self.data} given; {state['data']} would do, what {path} was trained on")

    def _begin(self, path: Path | None, done: int, tokens: int) -> Start:
        """Make the run's folder that of a run that goes on from `path`."""

        def note() -> int:
            if path is not None:
                if path.parent.resolve() != self.root.resolve():
                    put_aside(self.run)
                put_aside(self.run, done)
                self.say(f"going on after step {done}, from {path}; checkpoint.resume='never' would begin anew")
                if self.config.mesh.compress != "none":
                    self.say(
                        f"mesh.compress={self.config.mesh.compress!r}: errors that are fed back begin at zero again"
                    )
            return begin_attempt(self.run, done)

        return Start(done, tokens, self._first_rank(note))

    def _first_rank(self, what: Callable[[], Any]) -> Any:
        """What rank 0 finds, on all ranks; or its error."""
        answer: dict[str, Any] = {}
        if self.world.rank == 0:
            try:
                answer = {"found": what()}
            except (CheckpointError, DataError, SaveError) as error:
                answer = {"raised": type(error).__name__, "error": str(error)}
            except OSError as error:
                why = f"run.dir: {self.run} given: {error}; a folder that can be written would do"
                answer = {"raised": "SaveError", "error": why}
        answer = json.loads(said(json.dumps(answer), self.world))
        if "error" in answer:
            raise getattr(errors, answer["raised"])(answer["error"])
        return answer["found"]

    # --- after each step ------------------------------------------------------------------------------------------

    def after(self, done: int, tokens: int) -> None:
        """At the end of a step, on all ranks: commit, save, or leave, as the config or a signal asks.

        Raises Preempted where the run is to leave, and SaveError where a save failed and `checkpoint.on_error` is
        "stop".
        """
        settings, last = self.config.checkpoint, done == self.config.train.steps
        saver = self.saver
        own = Saving.WRITING if saver.writing else Saving.WRITTEN if saver.pending else Saving.IDLE
        asked = self.control.agree(done, own)
        if saver.pending and asked.saving == Saving.WRITTEN:
            self._commit()
        at_end = settings.at_end and (last or asked.stop)
        if at_end or asked.save or (settings.every and done % settings.every == 0):
            if saver.pending:
                self._commit()
            begin = time.perf_counter()
            saver.begin(done, held(self.step), self._numbers(done, tokens))
            self._waited = time.perf_counter() - begin
        if saver.pending and (last or asked.stop or not settings.asynchronous):
            self._commit()
        if asked.stop and not last:
            kept = f"saved in {self.root / folder.name_of(done)}" if settings.at_end else "not saved"
            raise Preempted(f"asked to leave after step {done}: {kept}; start it again to go on")

    def _settle(self, *_: Any) -> None:
        begin = time.perf_counter()
        self.saver.settle()
        self._waited += time.perf_counter() - begin

    def _commit(self) -> None:
        begin = time.perf_counter()
        try:
            path = self.saver.commit()
        except SaveError as error:
            if self.config.checkpoint.on_error == "stop":
                raise
            self._tell(f"no checkpoint: {error}")
            return
        if self.world.rank == 0 and self.config.checkpoint.keep:
            try:
                folder.retain(self.root, self.config.checkpoint.keep, self.config.checkpoint.keep_every)
            except OSError as error:
                self.say(f"older checkpoints stay: {error}")
        waited = self._waited + time.perf_counter() - begin
        self._tell(f"checkpoint {path}; training waited {waited:.2f} s for it")

    def _tell(self, line: str) -> None:
        if self.world.rank == 0:
            self.say(line)

    def _numbers(self, done: int, tokens: int) -> dict[str, Any]:
        """What state.json says."""
        config = replace(self.config, run=replace(self.config.run, dir=""))  # a folder may be moved
        return {
            **numbers(self.step),
            "tokens": tokens,
            "samples": done * self.config.train.global_batch,
            "config": asdict(config),
            "data": self.data,
            "mesh": {**self.step.mesh.sizes, "zero": self.config.mesh.zero},
            "versions": {
                "megalite": megalite.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }


def put_aside(run: Path, after: int | None = None) -> None:
    """Move what an earlier run left to `earlier-N`; after: only checkpoints of later steps, which come again."""
    root = run / CHECKPOINTS
    if after is None:
        moved = [run / name for name in OF_A_RUN if (run / name).exists()]
    else:
        moved = [root / folder.name_of(step) for step in folder.steps(root) if step > after]
    if not moved:
        return
    number = 1
    while (aside := run / f"earlier-{number}").exists():
        number += 1
    for path in moved:
        target = aside / path.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
