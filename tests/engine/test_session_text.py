"""The text of a session's turns: what goes in continues, what comes out starts afresh."""

import asyncio

import tokenizers

from refold.engine.delivery import Delivery
from refold.engine.prompts import extension_token_ids, prompt_token_ids
from refold.engine.streams import follow
from refold.engine.text import Tokenizer
from refold.journal.events import (
    OutputDelivered,
    RequestFinished,
    RequestSubmitted,
    Sampling,
    SessionExtended,
    SessionTurnEnded,
)
from refold.projections.outbox import Outbox
from tests.kit.engines import collect


def test_the_text_of_an_extension_brings_no_special_tokens() -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"<s>": 0, "a": 1, "b": 2}, merges=[]))
    inner.add_special_tokens(["<s>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    text = Tokenizer(inner, None, {})
    assert prompt_token_ids("ab", text, 3, 100) == [0, 1, 2]
    assert extension_token_ids("ab", text, 3, 100) == [1, 2]
    assert extension_token_ids("", text, 3, 100) == extension_token_ids([], text, 3, 100) == []


def test_each_turn_s_text_starts_afresh_wherever_its_reader_does() -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"\N{LOWER ONE EIGHTH BLOCK}a": 0, "b": 1}, merges=[]))
    inner.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    text, delivery = Tokenizer(inner, None, {}), Delivery(Outbox())
    sampling = Sampling(seed=0, max_tokens=2)
    delivery.deliver(
        0,
        [
            RequestSubmitted(
                handle=0, request_id="s", prompt_token_ids=[1], sampling=sampling, arrival_ns=0, resumable=True
            ),
            OutputDelivered(step=0, handles=[0], token_ids=[0, 0], first_output_indices=[0], counts=[2]),
            SessionTurnEnded(handle=0, reason="length", num_output_tokens=2),
            SessionExtended(handle=0, token_ids=[1], sampling=sampling),
            OutputDelivered(step=1, handles=[0], token_ids=[0, 0], first_output_indices=[2], counts=[2]),
            RequestFinished(handle=0, reason="length", num_output_tokens=4),
        ],
    )
    output = delivery.find("s")
    assert output is not None

    async def texts(start: int, *, one_turn: bool = False) -> list[str]:
        return [delta.text for delta in await collect(follow(delivery, output, start, text, one_turn=one_turn))]

    assert asyncio.run(texts(0)) == ["a a", "a a"]
    assert asyncio.run(texts(2)) == ["a a"]
    assert asyncio.run(texts(3)) == [" a"]
    assert asyncio.run(texts(1, one_turn=True)) == [" a"]
