"""Messages of a conversation, and the completions that people demonstrate or prefer.

The trap: a completion comes as a text, as turns behind a prompt, or as a whole conversation that repeats its prompt,
which then may have no column of its own. Here the prompt is split off, and what is left is a text where it is one turn.
"""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ratchet.data.plain_values import plain_value
from ratchet.errors import DataError

Message = dict[str, str]
"""Has "role" and "content"."""
Completion = str | list[Message]
"""What the assistant wrote: the text of one turn, or messages that begin and end with a turn of the assistant's."""

CHOSEN_KEYS: Final = ("chosen", "completion", "response", "answer")
"""Where a demonstration stands: the first of these columns that a row has."""
REJECTED: Final = "rejected"

_CONVERSATION_KEYS = ("chosen", "completion", "response", REJECTED)
_ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_OF = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant"}


def prompt_messages(prompt: Any, where: str) -> list[Message]:
    """A prompt as messages; a text is the user's. DataError where they are none, or where nothing is asked."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: expected the prompt to be a text or a list of messages, got {prompt!r:.80}")
    messages = _messages(prompt, where)
    if messages[-1]["role"] not in ("user", "tool"):
        raise DataError(
            f"{where}: the last message is of the role {messages[-1]['role']}, so that nothing is asked; expected a "
            "prompt that ends with the user's turn (a reference answer belongs in a column of its own)"
        )
    return messages


def completion(value: Any, where: str) -> Completion:
    """A completion as text, or as messages where it has several turns; DataError for what is neither."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: expected a text or a list of messages, got {value!r:.80}")
    return _completion(_messages(value, where), where)


def _completion(turns: list[Message], where: str) -> Completion:
    if not turns or {turns[0]["role"], turns[-1]["role"]} != {"assistant"}:
        roles = ", ".join(message["role"] for message in turns) or "no turn"
        raise DataError(f"{where}: expected a completion that begins and ends with the assistant's turn, got {roles}")
    return turns[0]["content"] if len(turns) == 1 else turns


def chosen_of(columns: Mapping[str, Any], where: str) -> Completion:
    """What a row demonstrates or prefers, from its `extra_info`; DataError where there is nothing of the kind."""
    for key in CHOSEN_KEYS:
        if columns.get(key) is not None:
            return completion(columns[key], f"{where}, {key}")
    found = ", ".join(key for key in columns if key not in ("split", "index")) or "nothing"
    raise DataError(f"{where}: expected a column {', '.join(CHOSEN_KEYS)} beside the prompt, got {found}")


def rejected_of(columns: Mapping[str, Any], where: str) -> Completion | None:
    """What a row prefers `chosen_of` to; None where it does not compare."""
    value = columns.get(REJECTED)
    return None if value is None else completion(value, f"{where}, {REJECTED}")


def without_prompt(record: Mapping[str, Any], prompt_key: str, where: str) -> Mapping[str, Any]:
    """The record with its prompt in `prompt_key` alone, and completions of one turn as texts.

    Whole conversations in `chosen`, `rejected`, `completion` or `response` give their common beginning as the prompt,
    up to a turn of the assistant's; one alone that has no counterpart, what precedes the assistant's first turn.
    `messages` is such a one where there is neither prompt nor chosen. A prompt that is also stated must agree.
    """
    talks = {key: record[key] for key in _CONVERSATION_KEYS if is_conversation(record.get(key))}
    rest = dict(record)
    if record.get(prompt_key) is None and not talks and is_conversation(record.get("messages")):
        talks = {"chosen": rest.pop("messages")}
    if not talks:
        return record
    turns = {key: _messages(talk, f"{where}, {key}") for key, talk in talks.items()}
    whole = {key: talk for key, talk in turns.items() if talk[0]["role"] != "assistant"}
    if whole:
        stated = record.get(prompt_key)
        place = f"{where}, {', '.join(whole)}"
        if stated is not None:
            stated = prompt_messages(stated, f"{where}, {prompt_key}")
        has_counterpart = len(whole) == 1 and record.get(REJECTED) is not None
        num_prompt = _prompt_length([*whole.values()], stated, place, has_counterpart=has_counterpart)
        rest[prompt_key] = next(iter(whole.values()))[:num_prompt]
        turns |= {key: talk[num_prompt:] for key, talk in whole.items()}
    return rest | {key: _completion(talk, f"{where}, {key}") for key, talk in turns.items()}


def _prompt_length(
    talks: Sequence[list[Message]], stated: list[Message] | None, where: str, *, has_counterpart: bool
) -> int:
    """How many messages at the beginning of these conversations are the prompt."""
    if stated is not None and all(_same(talk[: len(stated)], stated) for talk in talks):
        return len(stated)
    end = len(talks[0]) - 1
    if len(talks) > 1:
        end = 0
        while end < min(map(len, talks)) and all(_same(talk[end : end + 1], talks[0][end : end + 1]) for talk in talks):
            end += 1
    answered = [i for i in range(end + 1) if all(len(talk) > i and talk[i]["role"] == "assistant" for talk in talks)]
    if not answered:
        raise DataError(f"{where}: expected conversations of one prompt, which go on with the assistant's turn")
    length = answered[-1] if len(talks) > 1 or has_counterpart else answered[0]
    if stated is not None and not _same(talks[0][length - len(stated) : length], stated):
        raise DataError(f"{where}: expected the conversations to go on from the prompt {stated!r:.120}, got others")
    return length


def _same(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Whether these are the same messages, up to space around their texts."""
    return [(each["role"], each["content"].strip()) for each in one] == [
        (each["role"], each["content"].strip()) for each in other
    ]


def is_conversation(value: Any) -> bool:
    """Whether this is meant as messages; `completion` and `prompt_messages` say whether they are any."""
    return (
        isinstance(value, list) and bool(value) and all(isinstance(each, Mapping) and "role" in each for each in value)
    )


def _messages(values: list[Any], where: str) -> list[Message]:
    """Messages of known roles; DataError names the first that is none."""
    messages = []
    for message in values:
        message = plain_value(message, where)
        is_message = isinstance(message, dict) and set(message) == {"role", "content"}
        if not is_message or not all(isinstance(text, str) for text in message.values()):
            raise DataError(f"{where}: expected messages of the texts role and content, got {message!r:.120}")
        messages.append({"role": message["role"], "content": message["content"]})
    for number, role in enumerate((message["role"] for message in messages), start=1):
        if role not in _ROLES:
            near = _ROLE_OF.get(role.lower()) or difflib.get_close_matches(role.lower(), _ROLES, n=1, cutoff=0.0)[0]
            raise DataError(
                f"{where}: message {number} has the role {role!r}; expected one of {', '.join(_ROLES)} (use {near})"
            )
        if role == "system" and number > 1:
            raise DataError(f"{where}: message {number} is the system's; expected it to be the first")
    return messages
