"""Fields of a request's body: read, checked, refused by name.

Null is what is absent, as clients send it. What isn't looked at here is accepted and left out: clients send metadata of
many kinds. What would change the answer, and isn't computed, is refused.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from cuq1.errors import RequestError, TextError
from cuq1.sampling import DecodeParams
from cuq1.serve.http import refuse
from cuq1.serve.request import ApiError
from cuq1.serve.settings import MAX_LOGPROBS, MAX_MESSAGES, MAX_STOP_LENGTH, MAX_STOPS, MAX_TOOLS
from cuq1.text import check_tools

Body = Mapping[str, Any]

# Values that ask for nothing beyond what is done anyway; any other is refused.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "typical_p": (1,),
    "top_a": (0,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (0, False),
    "return_token_ids": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "documents": ([],),
    "chat_template": (),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "suffix": ("",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "grammar": (),
    "regex": (),
    "ebnf": (),
}


def check_neutral(body: Body, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL) -> None:
    """Refuses fields that would change the answer and aren't computed, unless they ask for what is done anyway."""
    for name, accepted in neutral.items():
        value = body.get(name)
        if value is not None and not any(type_equal(value, one) for one in accepted):
            only = f" with any value but {' or '.join(map(json.dumps, accepted))}" if accepted else ""
            refuse(name, f"is not supported{only}")


def type_equal(value: Any, other: Any) -> bool:
    """Equality under which True is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def integer(body: Body, name: str, low: int, high: int | None = None) -> int | None:
    """An integer in [low, high]; None where it is absent."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON has one kind of number
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        refuse(
            name,
            f"must be an integer of at least {low}" if high is None else f"must be an integer from {low} to {high}",
        )
    return int(value)


def number(body: Body, name: str, low: float, high: float) -> float | None:
    """A number in [low, high]; None where it is absent."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        refuse(name, f"must be a number from {low:g} to {high:g}")
    return float(value)


def boolean(body: Body, name: str, default: bool = False) -> bool:
    """True or false."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        refuse(name, "must be true or false")
    return bool(value)


def string(body: Body, name: str) -> str | None:
    """A string; None where it is absent."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        refuse(name, "must be a string")
    return value


def mapping(body: Body, name: str) -> dict[str, Any]:
    """An object; empty where it is absent."""
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        refuse(name, "must be an object")
    return dict(value)


def check_model(body: Body) -> None:
    """Any name is served, but a name it has to be."""
    string(body, "model")


def stops(body: Body, name: str = "stop") -> tuple[str, ...]:
    """Stop strings: one, or a list of them."""
    value = body.get(name)
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(stop, str) for stop in found):
        refuse(name, "must be a string or a list of strings")
    if len(found) > MAX_STOPS:
        refuse(name, f"has {len(found)} stop strings, and at most {MAX_STOPS} are taken")
    for stop in found:
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            refuse(name, f"has a stop string of {len(stop)} characters: use 1 to {MAX_STOP_LENGTH}")
    return tuple(found)


def params(body: Body, defaults: DecodeParams, *limits: str) -> DecodeParams:
    """Sampling parameters over the checkpoint's defaults; `limits` name the fields that bound the answer's tokens.

    The first limit that is given counts. A seed is any 64-bit integer, signed or not.
    """
    asked: dict[str, Any] = {
        "temperature": number(body, "temperature", 0, 100),
        "top_p": number(body, "top_p", 0, 1),
        "top_k": integer(body, "top_k", -1),
        "seed": integer(body, "seed", -(1 << 63), (1 << 64) - 1),
        "max_tokens": next((found for name in limits if (found := integer(body, name, 1)) is not None), None),
        "draft": body.get("draft"),
    }
    if asked["top_p"] == 0:
        refuse("top_p", "must be above 0 and at most 1")
    if asked["top_k"] == -1:  # some servers' way to say no limit
        asked["top_k"] = 0
    if asked["seed"] is not None:
        asked["seed"] %= 1 << 64
    try:
        return replace(defaults, **{name: value for name, value in asked.items() if value is not None})
    except RequestError as error:
        name = str(error).split(" ", 1)[0]
        raise ApiError("invalid", str(error), name) from None


def messages(body: Body) -> list[dict[str, Any]]:
    """The messages, counted; the template's checks come when they are rendered."""
    value = body.get("messages")
    if not isinstance(value, list) or not value:
        refuse("messages", "must be a list of at least one message")
    if len(value) > MAX_MESSAGES:
        refuse("messages", f"has {len(value)} messages, and at most {MAX_MESSAGES} are taken")
    return value


def tools(body: Body) -> list[dict[str, Any]]:
    """The tools, as `check_tools` returns them."""
    value = body.get("tools")
    if value is None:
        return []
    if isinstance(value, list) and len(value) > MAX_TOOLS:
        refuse("tools", f"has {len(value)} tools, and at most {MAX_TOOLS} are taken")
    try:
        return check_tools(value)
    except TextError as error:
        raise ApiError("invalid", str(error), str(error).split(" ", 1)[0]) from None


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
THINKING = {"enabled": True, "adaptive": True, "auto": True, "disabled": False}


def thinking(body: Body) -> tuple[bool | None, dict[str, Any]]:
    """Whether to reason first, None for the template's default; and the template's further variables.

    `chat_template_kwargs` come first, then the switches that clients know from elsewhere: `enable_thinking`, the type
    of `thinking`, and `reasoning_effort` or the effort of `reasoning`, which is off for none and minimal.
    """
    variables = mapping(body, "chat_template_kwargs")
    enabled = variables.pop("enable_thinking", None)
    if enabled is not None and not isinstance(enabled, bool):
        refuse("chat_template_kwargs.enable_thinking", "must be true or false")
    switch = boolean(body, "enable_thinking")
    kind = _one_of(THINKING, mapping(body, "thinking").get("type"), "thinking.type")
    efforts = (
        _one_of(EFFORTS, body.get("reasoning_effort"), "reasoning_effort"),
        _one_of(EFFORTS, mapping(body, "reasoning").get("effort"), "reasoning.effort"),
    )
    effort = next((one for one in efforts if one is not None), None)
    if enabled is None and body.get("enable_thinking") is not None:
        enabled = switch
    if enabled is None and kind is not None:
        enabled = THINKING[kind]
    if enabled is None and effort is not None:
        enabled = effort not in ("none", "minimal")
    return enabled, variables


def _one_of(known: Collection[str], value: Any, name: str) -> str | None:
    """One of the words that are known; None where it is absent."""
    if value is not None and not (isinstance(value, str) and value in known):
        refuse(name, f"must be one of {', '.join(known)}")
    return value


def top_logprobs(body: Body) -> int | None:
    """Chat Completions' `logprobs` and `top_logprobs`."""
    wanted = boolean(body, "logprobs")
    count = integer(body, "top_logprobs", 0, MAX_LOGPROBS)
    if count and not wanted:
        refuse("top_logprobs", "needs logprobs to be true")
    return (count or 0) if wanted else None
