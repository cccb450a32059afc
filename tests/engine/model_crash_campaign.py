"""The crash campaign on the real model: SmolLM2, killed at random instants, held against the golden tokens.

    python -m tests.engine.model_crash_campaign --kills 10 [--seed 0]

Ten greedy requests of 48 tokens on a pool small enough to preempt, window 2. What each client saw over all lives, put end to
end, must be what Hugging Face transformers generated from the same weights, once (tests/golden).
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.engine.crash_campaign import Round, Tally, Victims, _count_recovery, kill_one_life, victims

CASES = json.loads((Path(__file__).parent.parent / "golden" / "smollm2_greedy.json").read_text(encoding="utf-8"))[
    "cases"
]
POOL = {"block_size": 8, "num_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_in_flight_steps": 2}
NUM_REQUESTS = 10
LONGEST_LIFE_S = 25.0


class ModelRound(Round):
    """As a round on the simulated worker, with the golden prompts and what they must give."""

    def __post_init__(self) -> None:
        self.seen.touch()
        sampling = {"temperature": 0, "max_tokens": 48, "ignore_eos": True, "seed": 1}
        for number, case in enumerate(CASES[:NUM_REQUESTS]):
            self.requests.append({"id": f"r{number}", "prompt": case["prompt_token_ids"], "sampling": sampling})

    def life(self) -> str:
        life = {"journal": str(self.journal), "model": "smollm2", "seen": str(self.seen), "options": POOL}
        return json.dumps(life | {"requests": self.requests})

    def check_golden(self) -> int:
        """What clients saw is gapless, comes once, and is the golden output; returns the number of tokens."""
        together: dict[str, list[int]] = {request["id"]: [] for request in self.requests}
        for request_id, index, token_ids, _ in self.seen_lines():
            assert index == len(together[request_id]), f"{request_id}: index {index} after {len(together[request_id])}"
            together[request_id] += token_ids
        for number, case in enumerate(CASES[:NUM_REQUESTS]):
            assert together[f"r{number}"] == case["output_token_ids"], f"r{number} differs from the golden tokens"
        return sum(map(len, together.values()))


def run_round(victim: Victims, this: ModelRound, tally: Tally, max_kills: int) -> None:
    """Kill up to `max_kills` lives of one journal, then let it finish."""
    goal, is_over = tally.kills + max_kills, False
    while not is_over and tally.kills < goal:
        is_over = kill_one_life(victim, this, tally, LONGEST_LIFE_S)
    if not is_over:
        victim.begin(this.life())
        answers = victim.end()
        assert answers[-1] == "dead 0", answers
        opened: list[dict[str, Any]] = [json.loads(a.removeprefix("open ")) for a in answers if a.startswith("open ")]
        _count_recovery(tally, opened)
    totals = this.check_journal(is_over=True)
    tally.tokens += this.check_golden()
    tally.rounds += 1
    tally.requests += NUM_REQUESTS
    tally.preemptions += totals.preemptions
    tally.stale_delivered += totals.stale_tokens_delivered
    tally.stale_dropped += totals.stale_tokens_dropped


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    rng, tally, started_s = random.Random(arguments.seed), Tally(), time.monotonic()
    with victims() as victim, tempfile.TemporaryDirectory() as folder:
        while tally.kills < arguments.kills:
            path = Path(folder, f"round{tally.rounds}")
            path.mkdir()
            run_round(victim, ModelRound(path, rng), tally, min(5, arguments.kills - tally.kills))
            print(f"{tally.kills} kills so far", flush=True)
    tally.seconds = time.monotonic() - started_s
    print(tally.summary())


if __name__ == "__main__":
    main()
