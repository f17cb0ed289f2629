"""Column `layers`: the decoder layers run one by one, as quantize does, against the whole model."""

from __future__ import annotations

import torch
from llmopt.base.errors import BadInput
from llmopt.quant.model.architecture import architecture_of
from llmopt.quant.model.checkpoint import Checkpoint
from llmopt.quant.stream.layer_stream import LayerStream
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from tests.support.survey.case import Case, Verdict

SAMPLES, LENGTH = 3, 20
MOST_DIFFERENCE = 1e-5  # of the largest value


class StreamColumn:
    """Exact: the output projection reads what it reads when transformers runs the saved model as a whole."""

    name = "layers"

    def verdict(self, case: Case) -> Verdict:
        """Compare the inputs of the output projection."""
        case.model.save_pretrained(case.folder)
        vocabulary = case.config.get_text_config(decoder=True).vocab_size
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(5, min(100, vocabulary), (SAMPLES, LENGTH), generator=generator)
        checkpoint = Checkpoint(case.folder)
        try:
            stream = LayerStream(checkpoint, architecture_of(checkpoint))
            given = streamed_head_inputs(stream, ids)
        except BadInput as error:
            return Verdict("refused", str(error).replace(f"{case.folder}: ", ""))
        expected = head_inputs(_loaded(case), ids)
        difference = float((given - expected).abs().max() / expected.abs().max())
        if not difference < MOST_DIFFERENCE:
            return Verdict("wrong", f"differs by {difference:.1e}")
        return Verdict("exact", type(stream._walk).__name__.lower())


def streamed_head_inputs(stream: LayerStream, ids: torch.Tensor) -> torch.Tensor:
    """What the output projection reads of `[samples, length]` ids behind the layers, run one by one."""
    stream.prepare(ids)
    states = stream.embed(ids)
    for index in range(stream.num_layers):
        stream.load(index, stream.tensors(index))
        states = stream.run(index, states, in_place=bool(index % 2))
        stream.unload(index)
    return torch.cat(list(stream.head_inputs(states)))


def head_inputs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """What the output projection reads when transformers runs the whole model."""
    read: list[torch.Tensor] = []
    head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    handle = head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    handle.remove()
    return read[0]


def _loaded(case: Case) -> torch.nn.Module:
    """The saved model with transformers' own choice of attention, which quantize takes too."""
    with_images = type(case.config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto = AutoModelForImageTextToText if with_images else AutoModelForCausalLM
    model = auto.from_pretrained(case.folder, dtype=torch.float32, trust_remote_code=False)
    return model.eval()
