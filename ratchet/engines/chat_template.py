"""What a model's chat template makes of messages.

Trap: a template is a program that comes with the model. It runs in the sandbox of transformers, which keeps it from
files and modules, and neither from looping nor from growing.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import datetime

from transformers import PreTrainedTokenizerBase

from ratchet.errors import DataError

Messages = Sequence[Mapping[str, str]]
"""One conversation, with "role" and "content"."""

MAX_SECONDS = 30.0
"""Of one prompt, twice that at most where there are several; the usual time is a tenth of a millisecond."""
MAX_CHARACTERS = 16 * 2**20
"""Of one prompt."""

_DATE = datetime(2024, 7, 26)
"""Today, as far as chat templates can tell: what Llama's fall back to where they are given no clock."""


def rendered(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Messages]) -> list[str]:
    """Return the text of each conversation up to where the assistant's completion begins.

    DataError where the template refuses one or fails, and where it is over a limit.
    """
    texts: list[str] = []
    done: Future[None] = Future()

    def work() -> None:
        try:
            for messages in conversations:
                texts.append(_render(tokenizer, messages))
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    # Nothing else could leave a template that loops. It is a daemon, which ends with the process.
    threading.Thread(target=work, name="chat-template", daemon=True).start()
    while True:
        num_before = len(texts)
        try:
            done.result(MAX_SECONDS)
            return texts
        except FutureTimeoutError:
            if len(texts) == num_before:
                said = _said(conversations[num_before])
                raise DataError(f"chat template took more than {MAX_SECONDS:g} s for the messages {said}") from None


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str:
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=False,
            strftime_now=_DATE.strftime,  # a variable, which comes before the global of that name
        )
    except Exception as error:  # it may divide by zero, add text to numbers, or call itself
        raise DataError(f"chat template refused the messages {_said(messages)}: {error!s:.500}") from error
    if not isinstance(text, str) or len(text) > MAX_CHARACTERS:
        made = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
        raise DataError(
            f"chat template made {made} of the messages {_said(messages)}; expected at most {MAX_CHARACTERS}"
        )
    return text


def _said(messages: Messages) -> str:
    return repr(list(messages))[:500]
