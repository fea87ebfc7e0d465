"""What every section of the configuration is made of: the base class and the types of single values."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32", "torch.bfloat16": "bfloat16", "torch.float32": "float32"}


def _long_dtype(value: Any) -> Any:
    return _DTYPE_NAMES.get(value, value) if isinstance(value, str) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(gt=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
DType = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_long_dtype)]
Share = Annotated[float, Field(ge=0, le=1)]
DeviceName = Annotated[str, Field(min_length=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Logger = Literal["console", "jsonl", "mlflow", "tensorboard"]
Loggers = Annotated[tuple[Logger, ...], BeforeValidator(_as_list)]
KLType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]


class Section(BaseModel):
    """One group of keys; unknown ones are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
