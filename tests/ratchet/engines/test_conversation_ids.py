"""Conversations as tokens, and which of them the assistant wrote, under templates of several families."""

import copy
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ratchet.engines.chat_template import conversation_ids
from ratchet.engines.model import chat_prompt_ids
from ratchet.errors import DataError
from tests.tiny_models import CHAT_TEMPLATE, tiny_tokenizer

PROMPT = [{"role": "system", "content": "You are a baker."}, {"role": "user", "content": "12 loaves, and 30?"}]
TURNS = [
    {"role": "assistant", "content": "42."},
    {"role": "user", "content": "And one more?"},
    {"role": "assistant", "content": "43."},
]
HEADER = "<|im_start|>assistant\n"
BETWEEN = "\n<|im_start|>user\nAnd one more?<|im_end|>\n" + HEADER


def _with(template: str) -> Any:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def _texts(tokenizer: Any, completion: Any, prompt: Any = PROMPT) -> tuple[str, list[tuple[bool, str]]]:
    """The prompt's text and the completion's in runs of one mask; checks what holds for every conversation."""
    prompt_ids, ids, mask = conversation_ids(tokenizer, prompt, completion)
    assert prompt_ids == chat_prompt_ids(tokenizer, prompt), "the ids that a policy is asked with"
    assert len(ids) == len(mask) > 0
    assert mask[-1], "it ends with the token that ends the turn"
    runs: list[tuple[bool, list[int]]] = []
    for token_id, is_written in zip(ids, mask, strict=True):
        if not runs or runs[-1][0] != is_written:
            runs.append((is_written, []))
        runs[-1][1].append(token_id)
    return tokenizer.decode(prompt_ids), [(is_written, tokenizer.decode(part)) for is_written, part in runs]


def test_a_text_is_one_turn_with_its_end_and_without_what_the_template_writes_behind_it() -> None:
    prompt, runs = _texts(tiny_tokenizer(), "12 + 30 = 42\n")
    assert prompt.endswith(f"30?<|im_end|>\n{HEADER}")
    assert runs == [(True, "12 + 30 = 42\n<|im_end|>")]
    assert _texts(tiny_tokenizer(), "")[1] == [(True, "<|im_end|>")]


def test_of_several_turns_only_the_assistants_are_masked_in() -> None:
    _, runs = _texts(tiny_tokenizer(), TURNS)
    assert runs == [(True, "42.<|im_end|>"), (False, BETWEEN), (True, "43.<|im_end|>")]


def test_a_turn_has_the_same_ids_as_completion_and_as_prompt() -> None:
    """What is trained on is what the policy reads when the conversation goes on."""
    tokenizer = tiny_tokenizer()
    prompt_ids, ids, mask = conversation_ids(tokenizer, PROMPT, TURNS)
    first = conversation_ids(tokenizer, PROMPT, "42.")
    later = conversation_ids(tokenizer, [*PROMPT, *TURNS[:2]], "43.")
    assert prompt_ids + ids == later[0] + later[1]
    assert first[1] == ids[: len(first[1])]
    assert mask == [True] * len(first[1]) + [False] * (len(mask) - len(first[1]) - len(later[1])) + later[2]


TAGGED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] MARK }}{% endgeneration %}REST"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_the_mask_is_that_of_a_template_which_marks_its_turns_as_transformers_reads_it() -> None:
    marked = _with(TAGGED.replace("MARK", "+ '<|im_end|>'").replace("REST", "{{ '\n' }}"))
    reference = marked.apply_chat_template(
        [*PROMPT, *TURNS], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    # transformers keeps the line's end that the template writes behind the last turn.
    expected = list(zip(reference["input_ids"], map(bool, reference["assistant_masks"]), strict=True))[:-1]
    for tokenizer in (marked, tiny_tokenizer()):
        prompt_ids, ids, mask = conversation_ids(tokenizer, PROMPT, TURNS)
        found = [(token_id, False) for token_id in prompt_ids] + list(zip(ids, mask, strict=True))
        assert found == expected


def test_a_mark_that_leaves_the_end_of_the_turn_out_is_extended_to_it() -> None:
    tokenizer = _with(TAGGED.replace("MARK", "").replace("REST", "{{ '<|im_end|>\n' }}"))
    assert _texts(tokenizer, TURNS) == _texts(tiny_tokenizer(), TURNS)


STRIPS_THOUGHTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_an_empty_thought_that_the_template_gives_the_last_turn_alone_is_the_assistants() -> None:
    _, runs = _texts(_with(STRIPS_THOUGHTS), TURNS)
    assert runs == [(True, "42.<|im_end|>"), (False, BETWEEN), (True, "<think>\n\n</think>\n\n43.<|im_end|>")]


BEGINS_THOUGHTS = CHAT_TEMPLATE.replace("assistant\n", "assistant\n<think>\n").replace(
    "message['content']", "message['content'].split('</think>')[-1]"
)


@pytest.mark.parametrize("content", ["<think>\nhm\n</think>\n42", "hm\n</think>\n42"])
def test_a_thought_that_the_prompt_begins_is_neither_lost_nor_begun_twice(content: str) -> None:
    prompt, runs = _texts(_with(BEGINS_THOUGHTS), content)
    assert prompt.endswith("assistant\n<think>\n")
    assert runs == [(True, "hm\n</think>\n42<|im_end|>")]


NO_ENDS = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'].strip() + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def test_a_turn_that_the_template_does_not_end_is_ended_by_the_tokenizers_end() -> None:
    assert _texts(_with(NO_ENDS), " 42 ")[1] == [(True, "42<|im_end|>")]
    endless = _with(NO_ENDS)
    endless.eos_token = None
    with pytest.raises(DataError, match="with no token, and the tokenizer has no EOS token"):
        conversation_ids(endless, PROMPT, "42")


@pytest.mark.parametrize("template", [NO_ENDS, BEGINS_THOUGHTS])
def test_turns_that_one_sequence_cannot_hold_are_refused_with_the_fix(template: str) -> None:
    with pytest.raises(DataError, match=r"message 3 of 5 otherwise .*expected one turn .* or a template with {% gen"):
        conversation_ids(_with(template), PROMPT, TURNS)


@pytest.mark.parametrize(
    ("completion", "roles"), [([], "none"), (TURNS[:2], "assistant, user"), (TURNS[1:], "user, assistant")]
)
def test_a_completion_begins_and_ends_with_the_assistant(completion: Any, roles: str) -> None:
    with pytest.raises(DataError, match=f"begins and ends with the assistant's turn, got {roles}$"):
        conversation_ids(tiny_tokenizer(), PROMPT, completion)


def test_a_template_that_loops_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratchet.engines.chat_template.MAX_SECONDS", 0.2)
    slow = (
        "{% if not add_generation_prompt %}{% for i in range(3000) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"took more than 0\.2 s"):
        conversation_ids(_with(slow + "{% endif %}" + CHAT_TEMPLATE), PROMPT, "42")


def test_tokenizers_that_put_a_space_before_texts_put_none_before_completions() -> None:
    """Llama 2's kind: [INST] is no token, a word has its space in it, and a text alone is given one."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(["[INST] How many loaves are there? [/INST] There are 42 loaves."], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'] + ' </s>' }}{% endif %}{% endfor %}"
    )
    prompt = [{"role": "user", "content": "How many loaves are there?"}]
    prompt_ids, ids, mask = conversation_ids(fast, prompt, "There are 42")
    whole: Any = fast("<s>[INST] How many loaves are there? [/INST] There are 42 </s>", add_special_tokens=False)
    assert prompt_ids + ids == whole["input_ids"]
    assert all(mask)
    assert fast.convert_ids_to_tokens(ids)[-1] == "</s>"


OPENS_THOUGHTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


@pytest.mark.parametrize("text", ["<think>\nhm\n</think>\n\nyes", "hm\n</think>\n\nyes"])
def test_a_thought_that_the_template_writes_into_prompt_and_answer_is_not_begun_twice(text: str) -> None:
    prompt, runs = _texts(_with(OPENS_THOUGHTS), text)
    assert prompt.endswith(f"{HEADER}<think>\n")
    assert runs == [(True, "hm\n</think>\n\nyes<|im_end|>")]
