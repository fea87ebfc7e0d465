"""How much memory accelerators have, for those who do not give it.

Trap: data sheets say how much there is, and a process gets less of it. Where memory without ECC of its own gives a
share to it (L40S, A10G, L4, T4), that is less than the 10^9 bytes of the data sheet, too.
"""

from ratchet.errors import ConfigError

GIB = {
    "NVIDIA B200": 178.3,
    "NVIDIA H200": 139.7,
    "NVIDIA H100 80GB HBM3": 79.1,
    "NVIDIA A100-SXM4-80GB": 79.1,
    "NVIDIA A100-SXM4-40GB": 39.3,
    "NVIDIA L40S": 44.3,
    "NVIDIA A10G": 22.0,
    "NVIDIA L4": 22.0,
    "Tesla T4": 14.5,
}
"""Device, as torch names it -> what torch says that it has (`total_memory`), rounded down. The least that was reported
in public, where drivers differ: 178.35 and 139.72 (B200, H200); 79.10 (H100: huggingface/trl#2688); 79.25
(A100: levihsu/OOTDiffusion#235); 39.50 (TianheWu/CoSeR#10); 44.40 and 44.53 (L40, L40S: QwenLM/Qwen3-VL#2097,
Wan-Video/Wan2.1#205); 22 (A10G: huggingface/local-gemma#25); 22.03 (L4: ArcInstitute/evo2#190); 14.56 (T4:
Zheng-Chong/CatVTON#133). What nvidia-smi shows is a little more (modal-labs/modal-client#2797)."""


def memory_of(name: str) -> int:
    """Return an accelerator's bytes; ConfigError for one that is not in the table."""
    found = GIB.get(name)
    if found is None:
        raise ConfigError(
            f"--accelerator: expected one of {', '.join(GIB)}, got {name!r}; --accelerator-memory GIB says how "
            "much memory another one has"
        )
    return round(found * 2**30)
