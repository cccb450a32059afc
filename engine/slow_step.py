"""A worker that computes with torch operators for want of the compiled library: who runs it hears of it, once."""

from collections.abc import Mapping

from refold.gpu.native import CHOSEN

COST = "its products take 1.3 to 1.5 times as long in float32, 1.7 to 4.4 times in bfloat16 (docs/performance.md)"
GET_ONE = "install g++ (apt-get install g++), or let CXX name a C++ compiler, and start again"
NO_COMPILER = "no C++ compiler"


def why_slow(environment: Mapping[str, str]) -> tuple[str, str] | None:
    """What falls back and what that costs, and what to do about it; None if nothing does, or somebody wants it so."""
    missing = environment.get("not_native", "")
    if missing and missing != CHOSEN:
        is_ours = missing.startswith("a width is")
        remedy = "nothing can be done about it: it is the model's shape" if is_ours else _remedy(missing)
        return f"torch operators compute the model, as there is no compiled library ({missing}): {COST}", remedy
    failed = environment.get("self_test", "")
    if environment.get("step") == "torch" and "native: " in failed:
        return (
            f"torch operators compute the model, as the compiled library fails its self-test ({failed}): {COST}",
            "report it with the processor's and the compiler's names; REFOLD_STEP=torch says that you know",
        )
    return None


def _remedy(missing: str) -> str:
    return GET_ONE if missing.startswith(NO_COMPILER) else f"mend the compiler, or {GET_ONE}"
