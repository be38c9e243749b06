"""Import paths of the configuration, `module:attribute`, and the optional packages that a run needs."""

import difflib
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import marshal
import os
import shutil
import sys
import traceback
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from dagrl.attributes import setting
from dagrl.errors import ConfigError, MissingDependencyError, UserError

EXTRAS = {
    "megatron": ("megatron",),
    "vllm": ("vllm", "cpu"),
    "tensorboard": ("tracking",),
    "matplotlib": ("bench",),
    "wandb": ("tracking",),
    "math_verify": ("math",),
    "datasets": ("datasets",),
    "PIL": ("images",),
    "openenv": ("openenv",),
    "cupy": ("cu13", "cu12"),
}
"""Top-level module of an optional package -> the extras of dagrl that install it, the usual one first."""
IFEVAL = "lm_eval", "immutabledict", "langdetect", "nltk"
"""Top-level modules of the extra lm-eval[ifeval], which dagrl has no extra for."""

UNUSED = ("sklearn", "scipy", "pandas")
"""Packages that transformers and vLLM import where they are installed, for decoding, losses and sound that dagrl does
without: a tenth of all imports."""

BYTECODE_ROOM = 1 << 29  # free bytes for bytecode, which takes 150 MB
BYTECODE_UNUSED_S = 30 * 86_400  # seconds without use after which the bytecode of an environment is removed


def keep_bytecode() -> None:
    """Has this process and its children keep the bytecode of what they import in the user's cache, if torch has none and the
    import would write none.

    uv installs none, and `PYTHONDONTWRITEBYTECODE`, as in many images, or a read-only environment keeps Python from writing
    it. Then every start would compile torch and vLLM again, and their imports take three times as long.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.has_location or sys.pycache_prefix is not None:
        return
    compiled = Path(importlib.util.cache_from_source(str(spec.origin)))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # not absolute without a home
    written = os.access(compiled.parents[1], os.W_OK) and not sys.dont_write_bytecode
    if compiled.exists() or written or not cache.is_absolute():
        return
    there = next(path for path in (cache, *cache.parents) if os.path.exists(path))
    if shutil.disk_usage(there).free < BYTECODE_ROOM:  # Python would keep a file that is written in part, and read it
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    environment = f"{zlib.crc32(os.fsencode(sys.prefix)):08x}"  # has its own: that of others would be searched for damage
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(cache / "dagrl" / "bytecode" / environment)
    with suppress(OSError):
        _remove_damaged(Path(sys.pycache_prefix))


def _remove_damaged(kept: Path) -> None:
    """Removes bytecode that has changed since the last call and cannot be read, so that Python compiles it again. The first
    call of an environment also removes the bytecode of unused ones.

    Python recompiles files that are empty or of another version, but raises `EOFError: marshal data too short` for a file
    that a quota or a power failure has cut short (https://github.com/python/cpython/issues/126606).
    """
    tag = sys.implementation.cache_tag
    checked, begun = kept / f"checked.{tag}", kept / f"begun.{tag}"
    kept.mkdir(parents=True, exist_ok=True)
    begun.touch()  # the time, by the clock of the file system
    since = checked.stat().st_mtime_ns if checked.exists() else 0
    for directory, _, names in os.walk(kept):
        for path in (os.path.join(directory, name) for name in names if f".{tag}." in name and name.endswith(".pyc")):
            with suppress(OSError):
                try:
                    if os.stat(path).st_ctime_ns >= since:
                        marshal.loads(Path(path).read_bytes()[16:])  # noqa: S302 - after a header of 16 bytes
                except (EOFError, ValueError, TypeError):
                    os.unlink(path)
    begun.replace(checked)  # which also tells others when `kept` was last used
    for other in kept.parent.iterdir() if not since else ():
        if checked.stat().st_mtime - other.stat().st_mtime > BYTECODE_UNUSED_S:
            shutil.rmtree(other, ignore_errors=True)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disables the cyclic garbage collector of this process inside the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def brief_imports(*unused: str) -> Iterator[None]:
    """Lets nothing import the packages `unused` in the block, and does not look for each file of every installed package.

    transformers' import asks for the distributions of all packages: without `top_level.txt` that takes a second. The garbage
    collector is paused, which saves a quarter of the time.
    """
    absent = [package for package in unused if package not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    try:
        with gc_paused(), setting(importlib.metadata, packages_distributions=_distributions):
            yield
    finally:
        for package in absent:
            del sys.modules[package]


def _distributions() -> Mapping[str, list[str]]:
    """Returns what `importlib.metadata.packages_distributions` does, but also counts files that have been removed."""
    names = defaultdict[str, list[str]](list)
    for distribution in importlib.metadata.distributions():
        tops = (distribution.read_text("top_level.txt") or "").split()
        if not tops:
            files = distribution.read_text("RECORD") or distribution.read_text("SOURCES.txt") or ""
            parts = (line.partition(",")[0].partition("/") for line in files.splitlines())
            tops = list({head if slash else inspect.getmodulename(head) or head for head, slash, _ in parts})
        for name in tops:
            if "." not in name:
                names[name].append(distribution.metadata["Name"])
    return names


def load_attribute(path: str, key: str) -> object:
    """Returns the object at `module:attribute`. Also searches the working directory, for a user's own files.

    Raises ConfigError, naming the configuration's `key`, if it is not there; MissingDependencyError if the module needs an
    optional package that is not installed.
    """
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{key}: {path!r} is not an import path; write it as 'package.module:attribute'")
    module = _load_module(module_name, path, key)
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, [name for name in vars(module) if not name.startswith("_")], n=3)
        raise ConfigError(f"{key}: module {module_name!r} has no {attribute!r}{did_you_mean(near)} (in {path!r})")
    return getattr(module, attribute)


def load_class(path: str, key: str) -> type:
    """Returns the class at an import path. Raises ConfigError if it is not a class."""
    attribute = load_attribute(path, key)
    if not isinstance(attribute, type):
        raise ConfigError(f"{key}: {path!r} is of type {type(attribute).__name__}; a class is expected")
    return attribute


def load_callable(path: str, key: str) -> Callable[..., Any]:
    """Returns the callable at an import path. Raises ConfigError if it is not callable."""
    attribute = load_attribute(path, key)
    if not callable(attribute):
        raise ConfigError(f"{key}: {path!r} is of type {type(attribute).__name__}; a callable is expected")
    return cast("Callable[..., Any]", attribute)


def load_named(name: str, known: Collection[str], key: str) -> Callable[..., Any]:
    """Returns the callable at an import path, where the configuration's `key` takes the `known` names too."""
    if ":" not in name:
        raise ConfigError(
            f"{key} is {name!r}; expected: {', '.join(known)}, or the import path 'module:function' of your own"
        )
    return load_callable(name, key)


def check_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], path: str, key: str, positional: Sequence[str] = ()
) -> None:
    """Raises ConfigError, naming the configuration's `key`, if the callable at `path` does not take these arguments.

    They come after the `positional` ones.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # some C functions have no signature
        return
    try:
        signature.bind(*positional, **arguments)
    except TypeError as error:
        accepted, given = (", ".join(names) or "no arguments" for names in (signature.parameters, [*positional, *arguments]))
        raise ConfigError(f"{key}: {error}; {path} takes {accepted}, and is given {given}") from error


@contextmanager
def running(path: str, key: str) -> Iterator[None]:
    """Turns exceptions of the user's code that the configuration's `key` names into ConfigErrors with a traceback.

    UserErrors pass unchanged.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        below = error.__traceback__.tb_next if error.__traceback__ else None  # without this function's frame
        frames = "".join(traceback.format_exception(type(error), error, below)).rstrip()
        raise ConfigError(
            f"{key}: {path} raised {type(error).__name__}: {error}; fix it, or name another\n{frames}"
        ) from error


def require_package(module: str, key: str, otherwise: str = "") -> None:
    """Raises MissingDependencyError, naming the extra to install, if the top-level `module` cannot be found."""
    if importlib.util.find_spec(module) is None:
        raise MissingDependencyError(
            f"{key} needs the package {module!r}, which is not installed; {_install(module)}{otherwise}"
        )


def did_you_mean(near: list[str]) -> str:
    """Returns `; did you mean 'a' or 'b'?`, or nothing without near misses."""
    return f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else ""


def _load_module(name: str, path: str, key: str) -> Any:
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing == name or name.startswith(f"{missing}."):
            raise ConfigError(
                f"{key}: there is no module {missing!r} (in {path!r}); check the name and PYTHONPATH, or install its package"
            ) from error
        raise MissingDependencyError(
            f"{key}: importing {name!r} needs {missing!r}, which is not installed; {_install(missing.partition('.')[0])}"
        ) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: importing {name!r} raised {type(error).__name__}: {error}") from error


def _install(module: str) -> str:
    packages = ["lm-eval[ifeval]"] if module in IFEVAL else [f"dagrl[{extra}]" for extra in EXTRAS.get(module, ())]
    commands = [f"pip install '{package}'" for package in packages]
    return f"install it with {' or '.join(commands)}" if commands else f"install {module}"
