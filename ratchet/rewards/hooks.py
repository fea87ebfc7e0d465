"""Tells from a callable's signature how it grades, and calls it with the arguments that it takes.

There are two kinds: verl's hook grades one completion, `(data_source, solution_str, ground_truth, extra_info=None)`; a
batch reward grades a DataProto. The trap: users write the hook's parameters in another order or leave some out, so they
are passed by name wherever the names are known.
"""

import inspect
from collections.abc import Callable
from typing import Any, Literal

from ratchet.errors import ConfigError

Kind = Literal["hook", "batch"]

_NAMES = {
    "data_source": 0,
    "solution_str": 1,
    "completion": 1,
    "ground_truth": 2,
    "extra_info": 3,
}
_OTHER_NAMES = ("completions", "prompts")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def name_of(function: Any) -> str:
    """What messages call a reward."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {name_of(function)}: expected a callable with a signature ({error})") from error


def kind_of(function: Callable[..., Any]) -> Kind:
    """Whether `function` is a hook (one completion) or a batch reward (a DataProto); ConfigError where it is neither.

    A batch reward has one parameter without a default, of any name that is not one of the hook's.
    """
    call = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call):
        raise ConfigError(f"reward {name_of(function)} is a coroutine; write it as a plain function")
    parameters = _parameters(function)
    if any(parameter.name in _NAMES for parameter in parameters):
        return "hook"
    positional = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
    required = [parameter for parameter in positional if parameter.default is parameter.empty]
    # TRL's functions take lists of prompts and completions; to them a DataProto would be neither.
    if len(required) == 1 and required[0].name not in _OTHER_NAMES:
        return "batch"
    if len(required) in (3, 4) or (not positional and any(each.kind is each.VAR_KEYWORD for each in parameters)):
        return "hook"
    raise ConfigError(
        f"reward {name_of(function)}: expected (data_source, solution_str, ground_truth, extra_info=None) or "
        f"(data: DataProto), got ({', '.join(map(str, parameters))})"
    )


def keyword_call(function: Callable[..., Any], /, **kwargs: Any) -> Callable[[str, str, str | None, Any], Any]:
    """A call of the hook `function` that takes (data_source, completion, ground_truth, extra_info) in this order.

    Each value goes to the parameter of its name, where the function has one; a function that names none of them takes
    them by position. `kwargs` go to every call; ConfigError where the function does not take them.
    """
    parameters = _parameters(function)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    names = [parameter.name for parameter in parameters]
    unknown = [] if takes_any else [name for name in kwargs if name not in names]
    if unknown:
        raise ConfigError(
            f"reward {name_of(function)} takes no argument {', '.join(unknown)}; it takes {', '.join(names)}"
        )
    taken = {
        parameter.name: _NAMES[parameter.name]
        for parameter in parameters
        if parameter.name in _NAMES and parameter.kind is not parameter.POSITIONAL_ONLY
    }
    if takes_any:
        standard = ("data_source", "solution_str", "ground_truth", "extra_info")
        taken |= {name: _NAMES[name] for name in standard if _NAMES[name] not in taken.values()}
    if taken:
        _check_required(function, parameters, {*taken, *kwargs})
        return lambda *values: function(**{name: values[at] for name, at in taken.items()}, **kwargs)
    count = sum(parameter.kind in _POSITIONAL for parameter in parameters)
    return lambda *values: function(*values[:count], **kwargs)


def _check_required(function: Callable[..., Any], parameters: list[inspect.Parameter], given: set[str]) -> None:
    missing = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.name not in given
        and parameter.kind in (*_POSITIONAL, parameter.KEYWORD_ONLY)
    ]
    if missing:
        raise ConfigError(
            f"reward {name_of(function)} needs the argument {', '.join(missing)}: "
            "give it in custom_reward_function.reward_kwargs"
        )
