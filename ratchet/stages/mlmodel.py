"""What an exported model takes and gives, in the file by which MLflow's registry knows a model.

It lies beside the export's files, where MLflow looks for it: a version of the registry has no other place for a
signature. Trap: it is an artifact of its own. As one of the export's files it would be part of the export's digest, and
a run that starts from the export copies only what models are made of.
"""

import json

import yaml

_MESSAGE = {
    "type": "object",
    "properties": {"role": {"type": "string", "required": True}, "content": {"type": "string", "required": True}},
}
_MESSAGES = {"name": "messages", "type": "array", "items": _MESSAGE, "required": True}
_CHOICE = {
    "type": "object",
    "properties": {
        "index": {"type": "long", "required": True},
        "message": {**_MESSAGE, "required": True},
        "finish_reason": {"type": "string", "required": True},
    },
}
_CHOICES = {"name": "choices", "type": "array", "items": _CHOICE, "required": True}
_SCORE = {"name": "score", "type": "double", "required": True}


def mlmodel(*, is_classifier: bool) -> dict[str, bytes]:
    """Return the file: messages in and a message out, as chat completions have them; of a classifier, a score.

    No flavor is named: the folder is Hugging Face's, and whoever serves it reads it as such.
    """
    outputs = [_SCORE if is_classifier else _CHOICES]
    said = {
        "flavors": {},
        "metadata": {"task": "text-classification" if is_classifier else "llm/v1/chat"},
        "signature": {"inputs": json.dumps([_MESSAGES]), "outputs": json.dumps(outputs), "params": None},
    }
    return {"MLmodel": yaml.safe_dump(said, width=1_000_000).encode()}
