"""The sections that only a cluster reads: what each stage's pod asks for, and what promotes a policy."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ratchet.config.section import Count, Section, Share

_QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?"


def _as_text(value: Any) -> Any:
    # YAML and JSON read 4 as a number.
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else value


Quantity = Annotated[str, BeforeValidator(_as_text), Field(pattern=f"^{_QUANTITY}$")]
"""An amount as Kubernetes writes it: 500m, 4, 16Gi."""


_LABEL = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_PREFIX = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/"
LabelKey = Annotated[str, Field(pattern=f"^({_PREFIX})?{_LABEL}$")]
LabelValue = Annotated[str, Field(pattern=f"^({_LABEL})?$")]


class TolerationConfig(Section):
    """A taint that a pod accepts, in Kubernetes' own words.

    Kubernetes refuses a pod that has another word in it, and some installations then try again for hours.
    """

    key: LabelKey | None = None
    """The taint's key; every taint where it is not given, with the operator Exists."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Whether the taint must exist, or have this value."""
    value: LabelValue | None = None
    """The taint's value, with the operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """The taint's effect; any where it is not given."""
    tolerationSeconds: int | None = None
    """How long a pod stays after the taint came, with the effect NoExecute."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.key is None and self.operator != "Exists":
            raise ValueError("a toleration without a key accepts every taint: expected operator: Exists")
        if self.operator == "Exists" and self.value:
            raise ValueError(f"operator Exists takes no value, got {self.value!r}: expected operator: Equal")
        if self.tolerationSeconds is not None and self.effect != "NoExecute":
            raise ValueError("tolerationSeconds needs effect: NoExecute")
        return self


class PlacementConfig(Section):
    """What a pod asks for, and where it may run."""

    accelerator_type: Annotated[str, Field(pattern=f"^{_PREFIX}{_LABEL}$")] = "nvidia.com/gpu"
    """The resource's name, as the cluster's device plugin gives it."""
    accelerator_count: Count = 0
    """Accelerators of the pod; 0 asks for none."""
    cpu: Quantity = "1"
    """CPUs requested."""
    memory: Quantity = "8Gi"
    """Memory requested, and the limit above which the pod is killed."""
    node_selector: dict[LabelKey, LabelValue] = Field(default={})
    """Labels that the node must have."""
    tolerations: tuple[TolerationConfig, ...] = ()
    """Taints of nodes that the pod accepts, as Kubernetes writes them: {key, operator, value, effect}."""
    image: str = ""
    """Image of the pod; the stage's own where it is not given."""


class DeviceMapConfig(Section):
    """Where each stage's pod runs. Preflight, preprocess, plan and promotion need no accelerator and are not listed."""

    segment: PlacementConfig = PlacementConfig()
    """A segment of steps with sampler and trainer resident."""
    rollout: PlacementConfig = PlacementConfig()
    """Sampling, at stage grain."""
    scores: PlacementConfig = PlacementConfig()
    """Log-probs of policy and reference, and values, at stage grain."""
    policy_update: PlacementConfig = PlacementConfig()
    """The updates of policy and critic, at stage grain."""
    evaluate: PlacementConfig = PlacementConfig()
    """Evaluation and export after training."""


class PromotionConfig(Section):
    """What the policy must have shown to become the champion of a name."""

    name: str = ""
    """Name that champions succeed each other under, and MLflow's registered model; none promotes nothing."""
    min_accuracy: Share = 0.0
    """Held-out accuracy below which nothing is promoted."""
    min_improvement: Share = 0.0
    """By how much the held-out accuracy must exceed the champion's."""
    significant: bool = True
    """Compare the lower ends of the 95% intervals; false compares the measured means."""
