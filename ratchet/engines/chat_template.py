"""What a model's chat template makes of messages.

Traps: a template is a program that comes with the model. It runs in the sandbox of transformers, which keeps it from
files and modules, and neither from looping nor from growing. And it may say one message in other words once others
follow (Qwen 3 leaves out earlier thoughts), so that a conversation's text need not begin with its prompt's.
"""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ratchet.errors import DataError

Messages = Sequence[Mapping[str, str]]
"""One conversation, with "role" and "content"."""

MAX_SECONDS = 30.0
"""Of one prompt, twice that at most where there are several; the usual time is a tenth of a millisecond."""
MAX_CHARACTERS = 16 * 2**20
"""Of one prompt."""

_DATE = datetime(2024, 7, 26)
"""Today, as far as chat templates can tell: what Llama's fall back to where they are given no clock."""


_GENERATION_TAG = re.compile(r"{%-?\s*generation\s*-?%}")
_LAST_TAG = re.compile(r"<[^<>\s]+>$")
_PROBE = "cwm fjord bank glyphs vext quiz"
"""No part of a template, and the same text with and without spaces around it taken off."""

Span = tuple[int, int]
"""Characters of a text, the second excluded."""
T = TypeVar("T")


def rendered(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Messages], *, add_generation_prompt: bool = True
) -> list[str]:
    """Return the text of each conversation up to where the assistant's completion begins, or else to its end.

    DataError where the template refuses one or fails, and where it is over a limit.
    """
    return _within_limits(partial(_render, tokenizer, add_generation_prompt=add_generation_prompt), conversations)


def conversation_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, completion: str | Messages
) -> tuple[list[int], list[int], list[bool]]:
    """Return (prompt_token_ids, completion_token_ids, loss_mask): a conversation as a model would have sampled it.

    `completion` is the text of one turn of the assistant, or messages that begin and end with a turn of the
    assistant's, with others between. The prompt's ids are those of `chat_prompt_ids`. The completion ends with the
    token that ends the turn; the mask is true for the tokens of the assistant's turns, their ends included, and false
    for the template's words and other roles'. What the template itself marks by `{% generation %}` counts as the
    assistant's; else it is found from where the template would have the assistant begin.

    DataError for a completion without turns of the assistant, and where the template says turns so differently in the
    middle of a conversation that one sequence cannot hold what was sampled.
    """
    turns = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
    if not turns or {turns[0]["role"], turns[-1]["role"]} != {"assistant"}:
        roles = ", ".join(message["role"] for message in turns)
        raise DataError(f"expected a completion that begins and ends with the assistant's turn, got {roles or 'none'}")
    prompt_text, text, spans = _written_spans(tokenizer, prompt, turns)

    known = prompt_ids = _ids(tokenizer, prompt_text)
    completion_ids: list[int] = []
    mask: list[bool] = []
    start = len(prompt_text)
    boundaries = sorted({end for span in spans for end in span if end > start})
    for end in boundaries:
        # A token of its own begins at each boundary, as when the model itself went on from there.
        whole = _ids(tokenizer, text[:end])
        new = whole[len(known) :] if whole[: len(known)] == known else _ids(tokenizer, text[start:end])
        completion_ids += new
        mask += [any(first <= start < last for first, last in spans)] * len(new)
        known, start = [*known, *new], end
    return prompt_ids, completion_ids, mask


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    encoded: Any = tokenizer(text, add_special_tokens=False)
    return [int(token_id) for token_id in encoded["input_ids"]]


def _written_spans(
    tokenizer: PreTrainedTokenizerBase, prompt: Messages, turns: Messages
) -> tuple[str, str, list[Span]]:
    """Return (the prompt's text, the conversation's with the same beginning, what the assistant wrote of it)."""
    conversation = [*prompt, *turns]
    places = [place for place in range(len(prompt), len(conversation)) if conversation[place]["role"] == "assistant"]
    starts = rendered(tokenizer, [conversation[:place] for place in places])
    for place, begun in zip(places, starts, strict=True):
        message, tag = conversation[place], _LAST_TAG.search(begun.rstrip())
        if tag is not None:
            conversation[place] = {**message, "content": _without_opening(tag[0], message["content"])}
    within, last = _turn_ends(tokenizer, str(tokenizer.chat_template))
    template = tokenizer.get_chat_template()
    if _GENERATION_TAG.search(template):
        ((text, marked),) = _within_limits(partial(_render_marked, tokenizer, template), [conversation])
        if text.startswith(starts[0]):
            return starts[0], text, _closed(text, [span for span in marked if span[1] > len(starts[0])], within, last)
    else:
        (text,) = rendered(tokenizer, [conversation], add_generation_prompt=False)

    spans = []
    for place, begun in zip(places, starts, strict=True):
        content = conversation[place]["content"].strip()
        at = text.find(content, len(begun)) if text.startswith(begun) else -1
        end = last if place == places[-1] else within
        stop = text.find(end, at + len(content)) + len(end)
        if at < 0 or stop < len(end) or (not last and len(places) > 1):
            if len(places) > 1:
                raise DataError(
                    f"chat template says message {place + 1} of {len(conversation)} otherwise than it was sampled, or "
                    "does not end it with a token: expected one turn of the assistant's as the completion, and the "
                    f"earlier ones in the prompt, or a template with {{% generation %}}; got {_said(turns)}"
                )
            return _verbatim(tokenizer, begun, text, conversation[place]["content"], last)
        spans.append((len(begun), stop))
    if not last:
        text = text[: spans[-1][1]] + _end_of_text(tokenizer)
        spans[-1] = (spans[-1][0], len(text))
    return starts[0], text, spans


def _without_opening(opening: str, content: str) -> str:
    """The content without what the prompt ends with already: a thought that the template opens is not begun twice."""
    if not opening or not content.lstrip().startswith(opening):
        return content
    return content.lstrip().removeprefix(opening).lstrip("\n")


def _verbatim(
    tokenizer: PreTrainedTokenizerBase, begun: str, said: str, content: str, end: str
) -> tuple[str, str, list[Span]]:
    """The same for one turn that the template does not say as it stands: `content` after the prompt's text.

    Templates of reasoning models begin the thought in the prompt, and leave it out of what was answered. A thought
    that `content` begins itself is not begun twice.
    """
    shared = next((i for i, (a, b) in enumerate(zip(begun, said, strict=False)) if a != b), min(len(begun), len(said)))
    text = begun + _without_opening(begun[shared:].strip(), content) + (end or _end_of_text(tokenizer))
    return begun, text, [(len(begun), len(text))]


def _closed(text: str, marked: list[Span], within: str, last: str) -> list[Span]:
    """What the template marks, with the end of the turn where it stands behind the mark."""
    spans = []
    for start, stop in marked:
        end = next((each for each in (within, last) if each and text.startswith(each, stop)), "")
        spans.append((start, stop + len(end)))
    return spans


@lru_cache(maxsize=8)
def _turn_ends(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, str]:
    """What ends a turn of the assistant's when others follow, and the last: a text up to its token; "" for none."""
    asked, answered = {"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}
    tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    either = re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or "(?!)")
    texts = rendered(tokenizer, [[asked, answered, asked], [asked, answered]], add_generation_prompt=False)
    tails = [text.partition(_PROBE)[2] for text in texts]
    ends = [tail[: found.end()] if (found := either.search(tail)) else "" for tail in tails]
    return ends[0], ends[1]


def _end_of_text(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.eos_token:
        raise DataError("chat template ends the assistant's turn with no token, and the tokenizer has no EOS token")
    return str(tokenizer.eos_token)


def _within_limits(render: Callable[[Messages], T], conversations: Sequence[Messages]) -> list[T]:
    """`render` of each conversation; DataError where one takes too long."""
    made: list[T] = []
    done: Future[None] = Future()

    def work() -> None:
        try:
            for messages in conversations:
                made.append(render(messages))
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    # Nothing else could leave a template that loops. It is a daemon, which ends with the process.
    threading.Thread(target=work, name="chat-template", daemon=True).start()
    while True:
        num_before = len(made)
        try:
            done.result(MAX_SECONDS)
            return made
        except FutureTimeoutError:
            if len(made) == num_before:
                said = _said(conversations[num_before])
                raise DataError(f"chat template took more than {MAX_SECONDS:g} s for the messages {said}") from None


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, add_generation_prompt: bool) -> str:
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            strftime_now=_DATE.strftime,  # a variable, which comes before the global of that name
        )
    except Exception as error:  # it may divide by zero, add text to numbers, or call itself
        raise DataError(f"chat template refused the messages {_said(messages)}: {error!s:.500}") from error
    return _checked(text, messages)


def _render_marked(tokenizer: PreTrainedTokenizerBase, template: str, messages: Messages) -> tuple[str, list[Span]]:
    """The text of a whole conversation, and what the template's `{% generation %}` encloses of it."""
    variables: Any = tokenizer.special_tokens_map
    try:
        found: Any = render_jinja_template(
            [[dict(message) for message in messages]],
            chat_template=template,
            return_assistant_tokens_mask=True,
            strftime_now=_DATE.strftime,
            **variables,
        )
    except Exception as error:
        raise DataError(f"chat template refused the messages {_said(messages)}: {error!s:.500}") from error
    texts, marked = found
    return _checked(texts[0], messages), [(start, stop) for start, stop in marked[0]]


def _checked(text: object, messages: Messages) -> str:
    if not isinstance(text, str) or len(text) > MAX_CHARACTERS:
        made = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
        raise DataError(
            f"chat template made {made} of the messages {_said(messages)}; expected at most {MAX_CHARACTERS}"
        )
    return text


def _said(messages: Messages) -> str:
    return repr(list(messages))[:500]
