"""Simulated lives in which most requests want log-probabilities. What went wrong in them goes wrong here too."""

import msgspec

from refold.gpu.simulated import simulated_surprisals
from refold.journal.settings import Sampling
from refold.projections.outbox import Outbox, Output
from refold.scheduler.commands import Command, ExtendSession, SubmitRequest
from tests.kit.player import Order, Player
from tests.kit.simulation import Simulation

WISHES = ({"logprobs": 0}, {"logprobs": 3, "prompt_logprobs": 0}, {}, {"prompt_logprobs": 2}, {"logprobs": 20})


class AskingPlayer(Player):
    """Whoever submits wants what the seed says."""

    def obey(self, order: Order | Command) -> None:
        if isinstance(order, SubmitRequest | ExtendSession):
            in_turns = isinstance(order, ExtendSession) or order.resumable
            order = msgspec.structs.replace(order, sampling=_asking(order.sampling, in_turns=in_turns))
        super().obey(order)


class AskingSimulation(Simulation):
    def __init__(self, seed: int, turns: int = 70) -> None:
        super().__init__(seed, turns)
        self.drive = AskingPlayer(self.drive.config)


def _asking(sampling: Sampling, *, in_turns: bool) -> Sampling:
    wishes = dict(WISHES[sampling.seed % len(WISHES)])
    if in_turns:
        wishes.pop("prompt_logprobs", None)
    return msgspec.structs.replace(sampling, **wishes)


def judge_logprobs(simulation: AskingSimulation) -> int:
    """What clients got is what the worker thought, of each token that they got and of no other. Returns how many."""
    outbox, seen = Outbox(), 0
    for events in simulation.drive.records:
        outbox.observe_all(events)
    submitted = {c.request_id: c for c in simulation.drive.commands if isinstance(c, SubmitRequest)}
    for output in outbox.by_handle.values():
        command = submitted[output.request_id]
        if not output.is_session:
            seen += _judge(output, command, simulation.drive.config.vocab_size)
    return seen


def _judge(output: Output, command: SubmitRequest, vocab_size: int) -> int:
    sampling, prompt = command.sampling, command.prompt_token_ids
    expected = {}
    if sampling.logprobs is not None:
        expected = {
            index: simulated_surprisals(sampling.seed, len(prompt) + index, token, sampling.logprobs, vocab_size)
            for index, token in enumerate(output.token_ids)
        }
    assert output.surprisals == expected, output.request_id
    of_prompt = None
    if sampling.prompt_logprobs is not None and output.token_ids:
        of_prompt = [
            simulated_surprisals(sampling.seed, position, prompt[position], sampling.prompt_logprobs, vocab_size)
            for position in range(1, len(prompt))
        ]
    assert output.prompt_surprisals == of_prompt, output.request_id
    return len(expected) + len(of_prompt or ())
