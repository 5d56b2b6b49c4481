"""Settings from a TOML file, with dotted overrides on top.

    [model]  preset = "llama-tiny"          megalite train config.toml mesh.tp=4 train.steps=100
    [mesh]   tp = 2

Every key must be known and every value of its type; a mistake is a ConfigError of one line, with the nearest name.
Presets are handed in by whoever loads, so that this needs no model.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megalite.config import Config, check
from megalite.errors import ConfigError


def load(
    path: str | Path | None, overrides: Sequence[str] = (), presets: Mapping[str, Mapping[str, Any]] | None = None
) -> Config:
    """The Config of a TOML file (None: the defaults) with `section.key=value` overrides on top.

    Values of overrides are read as TOML, and as plain strings where they are none: `mesh.tp=2`, `run.dir=runs/a`.
    """
    settings = _read(Path(path)) if path is not None else {}
    for override in overrides:
        name, equals, text = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot and key):
            raise ConfigError(f"override: {override!r} given; section.key=value would do, e.g. mesh.tp=2")
        settings.setdefault(section, {})
        if not isinstance(settings[section], dict):
            raise ConfigError(f"{section}: {settings[section]!r} given; a table [{section}] would do")
        settings[section][key] = _value(text.strip())
    model = settings.get("model")
    if isinstance(model, dict) and model.get("preset"):
        known = presets or {}
        if not isinstance(model["preset"], str) or model["preset"] not in known:
            raise ConfigError(f"model.preset: {model['preset']!r} given; {_nearest(str(model['preset']), known)}")
        settings["model"] = {**known[model["preset"]], **model}
    return from_tables(settings)


def from_tables(settings: Mapping[str, Any]) -> Config:
    """The Config of nested tables, as TOML and JSON have them: what `dataclasses.asdict` made of one, for instance."""
    return check(_build(Config, settings, ""))


def to_toml(config: Config) -> str:
    """The config as a TOML file that `load` reads back, every setting written out."""
    lines = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        for key, value in dataclasses.asdict(getattr(config, section.name)).items():
            if key != "preset":  # its settings are written out
                text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
                lines.append(
                    f"{key} = {text}".replace("\x7f", "\\u007f")
                )  # which JSON leaves as it is and TOML forbids
        lines.append("")
    return "\n".join(lines)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; the path of a TOML file would do") from None
    except (OSError, ValueError, RecursionError) as error:  # TOML's and Unicode's are ValueErrors
        raise ConfigError(f"{path}: not a TOML file that can be read: {error}") from None


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _build(cls: type, settings: Any, where: str) -> Any:
    """An instance of the dataclass `cls`, every key known and every value of its type."""
    if not isinstance(settings, dict):
        raise ConfigError(f"{where}: {settings!r} given; a table [{where}] would do")
    kinds = typing.get_type_hints(cls)
    values = {}
    for key, value in settings.items():
        shown = key if key.isprintable() else repr(key)
        name = f"{where}.{shown}" if where else shown
        if key not in kinds:
            raise ConfigError(f"{name}: no such setting; {_nearest(key, kinds)}")
        kind = kinds[key]
        section = isinstance(kind, type) and dataclasses.is_dataclass(kind)
        values[key] = _build(kind, value, name) if section else _typed(value, kind, name)
    return cls(**values)


def _typed(value: Any, kind: Any, name: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value in arguments and isinstance(value, str):
            return value
        raise ConfigError(f"{name}: {value!r} given; {' or '.join(repr(a) for a in arguments)} would do")
    if origin is tuple:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            value = [value]
        if isinstance(value, list):
            return tuple(_typed(item, arguments[0], f"{name}[{i}]") for i, item in enumerate(value))
        raise ConfigError(f"{name}: {value!r} given; a list would do")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if type(value) is not kind:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
        raise ConfigError(f"{name}: {value!r} given; {words[kind]} would do")
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{name}: {value} given; a finite number would do")
    return value


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"one of {', '.join(sorted(known))} would do"
