"""Whether a node can take a pod, said of the nodes that come nearest."""

from decimal import Decimal

import pytest

from ratchet.cluster.fitting import Misfit, Request, misfit, quantity
from ratchet.cluster.records import Node

GPU = "nvidia.com/gpu"
TAINT = {"key": GPU, "value": "present", "effect": "NoSchedule"}


def node(name: str, *, gpu: int = 0, taints: tuple[dict[str, str], ...] = (), **labels: str) -> Node:
    amounts = {"cpu": "15890m", "memory": "65011712Ki"} | ({GPU: str(gpu)} if gpu else {})
    return Node(name=name, labels=labels, taints=taints, allocatable=amounts)


def asked(count: int = 1, **more: object) -> Request:
    return Request(accelerator_type=GPU, accelerator_count=count, cpu="8", memory="32Gi", **more)  # type: ignore[arg-type]


def said(nodes: list[Node], request: Request) -> Misfit:
    found = misfit(nodes, request, "device_map.rollout")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("500m", "0.5"), ("4", "4"), ("16Gi", str(16 * 1024**3)), ("1.5Gi", "1610612736"), ("2G", "2000000000"),
        ("65011712Ki", "66571993088"), ("1e3", "1000"), ("100u", "0.0001"),
    ],
)  # fmt: skip
def test_amounts_are_read_as_kubernetes_writes_them(text: str, number: str) -> None:
    assert quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "four", "4 Gi", "1KiB"])
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected an amount such as 500m, 4 or 16Gi"):
        quantity(text)


def test_a_node_with_everything_takes_the_pod() -> None:
    assert misfit([node("cpu"), node("gpu", gpu=8)], asked(8), "device_map.rollout") is None


def test_a_pod_without_accelerators_may_go_anywhere() -> None:
    assert misfit([node("cpu")], Request(cpu="1", memory="8Gi"), "device_map.rollout") is None


def test_a_cluster_without_the_accelerator_names_those_that_it_has() -> None:
    other = Node(name="amd", allocatable={"cpu": "8", "memory": "64Gi", "amd.com/gpu": "4", "hugepages-2Mi": "0"})
    found = said([node("cpu"), other], asked())
    assert found.kind == "resource"
    assert found.message == (
        "expected a node with nvidia.com/gpu, got none; the cluster has amd.com/gpu (4): "
        "correct device_map.rollout.accelerator_type"
    )


def test_a_label_that_no_node_has_names_the_values_that_there_are() -> None:
    nodes = [node("a", gpu=8, gpu_model="a100"), node("b", gpu=8, gpu_model="a100"), node("c", gpu_model="l40")]
    found = said(nodes, asked(node_selector={"gpu_model": "h100"}))
    assert found.kind == "labels"
    assert found.message == (
        "expected a node with gpu_model=h100, got none: gpu_model is a100 on 2 nodes, l40 on 1 node; "
        "correct device_map.rollout.node_selector"
    )


def test_a_label_that_is_misspelt_names_the_nearest() -> None:
    found = said([node("a", gpu=8, gpu_model="a100")], asked(node_selector={"gpu_modell": "a100"}))
    assert "no node has a label gpu_modell (there is gpu_model)" in found.message


def test_a_selector_that_leaves_out_the_nodes_with_the_accelerator_says_so() -> None:
    found = said([node("a", gpu=8, zone="1"), node("b", zone="2")], asked(node_selector={"zone": "2"}))
    assert found.message == (
        "device_map.rollout.node_selector leaves out every node with nvidia.com/gpu (a): correct one of the two"
    )


def test_a_taint_is_named_with_the_toleration_that_it_needs() -> None:
    nodes = [node("cpu"), node("gpu", gpu=8, taints=(TAINT,))]
    found = said(nodes, asked())
    assert (found.kind, found.taints) == ("taint", (GPU,))
    assert found.message == (
        "the nodes that could take it (gpu) have taints (nvidia.com/gpu=present:NoSchedule): add to "
        "device_map.rollout.tolerations {key: nvidia.com/gpu, value: present, effect: NoSchedule}"
    )


@pytest.mark.parametrize(
    ("toleration", "is_enough"),
    [
        ({"key": GPU, "operator": "Exists"}, True),
        ({"key": GPU, "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"key": GPU, "value": "present"}, True),
        ({"operator": "Exists"}, True),
        ({"key": GPU, "value": "absent"}, False),
        ({"key": GPU, "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_tolerations_are_matched_as_kubernetes_does(toleration: dict[str, str], is_enough: bool) -> None:
    nodes = [node("gpu", gpu=8, taints=(TAINT,))]
    assert (misfit(nodes, asked(tolerations=[toleration]), "device_map.rollout") is None) == is_enough


def test_a_taint_that_only_prefers_other_pods_keeps_none_away() -> None:
    soft = {**TAINT, "effect": "PreferNoSchedule"}
    assert misfit([node("gpu", gpu=8, taints=(soft,))], asked(), "device_map.rollout") is None


def test_a_node_that_is_too_small_is_told_with_what_it_has() -> None:
    found = said([node("small", gpu=4), node("cpu")], asked(8))
    assert found.kind == "amount"
    assert found.message == (
        "no node is large enough: of the nearest, small, the pod would need 8 nvidia.com/gpu (it has 4); "
        "lower device_map.rollout.accelerator_count"
    )
    large = said([node("gpu", gpu=8)], Request(cpu="64", memory="1Ti"))
    assert "64 cpu (it has 15890m), 1Ti memory (it has 65011712Ki); lower device_map.rollout.cpu" in large.message


def test_nodes_that_are_not_ready_or_cordoned_take_nothing() -> None:
    away = Node(name="a", is_ready=False), Node(name="b", is_cordoned=True)
    found = said(list(away), Request(cpu="1"))
    assert (found.kind, found.message) == (
        "no_node",
        "expected a node that takes pods, got none: 2 are not ready or cordoned",
    )
