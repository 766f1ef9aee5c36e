"""Loading and saving of a run's state: checkpoints, settings, tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from hexad.checkpoint.base import Base, base_of, load_base, load_weights, recorded, removal_notice
from hexad.checkpoint.checkpointer import Checkpointer
from hexad.checkpoint.directory import changed_settings
from hexad.checkpoint.kept_tokenizer import FOLDER, keep_tokenizer, saved_form
from hexad.checkpoint.manifest import DamagedCheckpoint, Manifest
from hexad.comm import agreed
from hexad.config import AgreedError, ConfigError, HexadError, dump_config
from hexad.dataset.built import Identity, check_same_data
from hexad.dataset.files import write_durably
from hexad.engine.engine import Engine
from hexad.launching.launch import Run
from hexad.planning.costs import parameter_count, trained_count
from hexad.topology.mesh import Axis

log = logging.getLogger("hexad")


class Evaluations:
    """The evaluations of a run, kept to choose the best checkpoints and to stop early.

    Attributes:
        best: (loss, step) of the lowest losses, ascending; one, or as many as are kept.
        since: evaluations after the lowest one.
    """

    def __init__(self, keep: int) -> None:
        self._most = max(1, keep)
        self.best: list[tuple[float, int]] = []
        self.since = 0

    def add(self, loss: float, step: int) -> bool:
        """Add an evaluation; returns whether it is among the best."""
        lowest = isfinite(loss) and (not self.best or loss < self.best[0][0])
        self.since = 0 if lowest else self.since + 1
        self.best = sorted([*self.best, (loss, step)] if isfinite(loss) else self.best)[: self._most]
        return (loss, step) in self.best

    def progress(self) -> dict[str, Any]:
        """Progress for a checkpoint; nothing before the first evaluation."""
        known = bool(self.best or self.since)
        return {"validation": {"best": self.best, "since": self.since}} if known else {}

    def restored(self, progress: Mapping[str, Any]) -> None:
        """Continue from :meth:`progress`."""
        state = progress.get("validation", {"best": [], "since": 0})
        self.best = [(loss, step) for loss, step in state["best"]][: self._most]
        self.since = state["since"]


class Saves:
    """The checkpoints of a run, on one rank; all ranks call the same methods together.

    Args:
        run: from :func:`hexad.launch`.
        engine: whose state it is; made with ``initialise=False``, as :meth:`begin` sets all values. Where it
            has user-defined modules, ``model`` has no part in them.
        data: of the run, as :func:`hexad.dataset.built.identities` says; others under the same prefix are
            refused when the run resumes.

    Attributes:
        checkpointer: writes and finds the files.
        base: the weights that adapters (``model.lora``) belong to; None without adapters.
        evaluations: of the run, in every checkpoint.
    """

    def __init__(self, run: Run, engine: Engine, data: Mapping[str, Identity] | None = None) -> None:
        self.run, self.engine, self._data = run, engine, dict(data or {})
        self.config = run.resolved.config
        self.checkpointer = Checkpointer(self.config, run.mesh)
        self.base: Base | None = None
        self.evaluations = Evaluations(self.config.checkpoint.keep_best)
        self._begun = False

    def begin(self) -> None:
        """Give the engine the newest checkpoint of the run (or of ``checkpoint.load``), saved in whatever
        layout; without one the weights that ``model.load`` names, or initial values. ``run.dir`` keeps the
        settings and the tokenizer.

        Raises:
            AgreedError: they are damaged or of another model, ``checkpoint.resume`` does not allow it, or
                ``run.dir`` cannot be written.
        """
        manifest = self._load_newest(self.checkpointer.find)
        if manifest is not None:
            self._resume(*manifest)
        elif self.engine.workload.configured:
            self.base = start(self.engine, self.run.mesh.world)
        else:
            self.engine.initialise()
            log.info("starting a new run")
        self.run.agreed(self._keep_settings)
        self._begun = True

    def _resume(self, path: Path, manifest: Manifest) -> None:
        self.base = loaded_base(self.engine, path, manifest, self.run.mesh.world)
        self.engine.restored(manifest.progress)
        if path.parent == self.checkpointer.directory.path:  # not of the run that checkpoint.load names
            self.evaluations.restored(manifest.progress)
        log.info("resuming from %s: step %d, %d samples", path, manifest.step, manifest.samples)
        for change in changed_settings(manifest.config, saved_form(self.config)):
            log.info("changed since: %s", change)

    def save(self, reason: str = "schedule", last: bool = False) -> None:
        """Save the engine's state, as :meth:`Checkpointer.save` does: in the background, if so configured.

        Args:
            reason: why it is saved.
            last: the run ends with it, so that it must succeed whatever ``checkpoint.on_failure`` is.

        Raises:
            HexadError: :meth:`begin` was not called: what the adapters belong to would not be recorded.
            AgreedError: this save failed, or the previous one that ran in the background.
        """
        if not self._begun:
            raise HexadError("Saves.save: call begin first, which loads what the run begins with")
        progress = {**self.engine.progress(), **recorded(self.base), **self.evaluations.progress()}
        progress |= {"data": self._data} if self._data else {}
        self.checkpointer.save(self.engine.chunks(), progress, reason, last)

    def roll_back(self) -> Manifest | None:
        """Load the newest checkpoint of the run, but continue with the data after what has been read; None if
        there is none."""
        samples = self.engine.samples
        self.checkpointer.wait()
        manifest = self._load_newest(self.checkpointer.newest)
        if manifest is None:
            return None
        self.engine.rolled_back(manifest[1].progress, samples)
        self.evaluations.restored(manifest[1].progress)  # without those of steps that will be repeated
        return manifest[1]

    def close(self) -> None:
        """Finish the save in progress."""
        self.checkpointer.close()

    def _keep_settings(self) -> None:
        """Write to ``run.dir`` what the run needs to be resumed, exported or generated from anywhere: its
        settings and its tokenizer."""
        if self.run.mesh.rank:  # the first rank writes
            return
        directory = Path(self.config.run.dir)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            keep_tokenizer(self.config)
            write_durably(directory / "config.yaml", dump_config(saved_form(self.config)))
        except OSError as error:
            where = f"{error.filename or directory / FOLDER}: {error.strerror}"
            raise ConfigError("run.dir", f"cannot keep settings and tokenizer: {where}") from None

    def _check_data(self, path: Path, manifest: Manifest) -> None:
        """Refuse data that were rebuilt or replaced, and report others."""
        recorded = manifest.progress.get("data", {})
        check_same_data(recorded, self._data, str(path))
        names = [{sampled for sampled, _ in data.values()} for data in (recorded, self._data)]
        if recorded and names[0] != names[1]:
            text = "the run continues with other data: samples from %d on are counted in their order"
            log.warning(text, manifest.samples)

    def _load_newest(self, find: Callable[[], Path | None]) -> tuple[Path, Manifest] | None:
        """Load the checkpoint that ``find`` finds, renaming damaged ones if the settings allow it; None if
        there is none."""
        path = find()
        if path is None:
            return None
        try:
            return path, self.checkpointer.load(path, self.engine.chunks(), partial(self._check_data, path))
        except AgreedError as error:
            if not issubclass(error.kind, DamagedCheckpoint):
                raise
            self.checkpointer.set_aside(path, error)
        return self._load_newest(find)


def start(engine: Engine, world: Axis) -> Base | None:
    """Give the language model the values that a new run begins with: the weights that ``model.load`` names,
    or initial values; all ranks together. Returns what adapters belong to; None without adapters.

    Raises:
        AgreedError: weights that are missing, damaged or of another model.
    """
    model = engine.config.model
    base, with_weights = Base.drawn(engine.config), ""
    if model.lora is not None:
        engine.initialise(frozen=model.load is None)
    if model.load is not None:
        base = load_weights(engine.config, model.load, engine.weights(), world)
        engine.publish()
        with_weights = f" with the weights of {model.load}"
        if model.lora is not None and not world.rank and (notice := removal_notice(base)):
            log.warning("%s", notice)
    elif model.lora is not None:
        log.warning("model.lora adapts weights that are drawn at random: model.load names none")
    else:
        engine.initialise()
    parameters, trained = parameter_count(model), trained_count(model)
    part = f", {trained:,} trained" if trained != parameters else ""
    log.info("starting a new run%s: %s parameters%s", with_weights, f"{parameters:,}", part)
    return None if model.lora is None else base


def loaded_base(engine: Engine, path: Path, manifest: Manifest, world: Axis) -> Base | None:
    """Load the weights that the adapters in a checkpoint belong to, all ranks together; None without
    adapters.

    Raises:
        AgreedError: they are missing, or others.
    """
    if not engine.workload.configured or engine.config.model.lora is None:
        return None
    base = agreed(lambda: base_of(path, manifest), world)
    load_base(base, engine.config, engine.fixed(), world)
    return base
