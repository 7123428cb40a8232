"""Run by the Python of the authors' libraries: logits of a block head of theirs after a text.

    block_logits.py LIBRARY HEAD...    LIBRARY: dflash or speculators; HEAD/inputs.safetensors: "tokens" [T], the root last,
                                       "features" [T - 1, F] of the tokens before it, "embed" and "lm_head" [V, D] of the target,
                                       and "path" [S], the token before that of each level

The logits of a head, [S, V'], go into HEAD/logits.safetensors.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def by_dflash(head: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    from dflash.model import DFlash2DraftModel, DFlashDraftModel

    second = json.loads((Path(head) / "config.json").read_text())["architectures"] == ["DFlash2DraftModel"]
    model = (DFlash2DraftModel if second else DFlashDraftModel).from_pretrained(head, dtype=torch.float32).eval()
    block, tokens, path = model.block_size, inputs["tokens"], inputs["path"]
    ids = torch.full((1, block), model.mask_token_id)
    ids[0, 0] = tokens[-1]
    inner = model.config.dflash_config
    scale = inner.get("input_embedding_scale", getattr(model.config, "input_embedding_scale", 1.0))
    embedded = inputs["embed"][ids] * scale
    positions = torch.arange(len(tokens) - 1 + block)[None]
    hidden = model(position_ids=positions, noise_embedding=embedded, target_hidden=inputs["features"][None])[0, 1:]
    lm_head = torch.nn.Linear(*reversed(inputs["lm_head"].shape), bias=False)
    lm_head.weight.data = inputs["lm_head"]
    logits = model.compute_logits(hidden, lm_head)
    return _selected(model.candidate_selector, logits, hidden, path) if second else logits


def by_speculators(head: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    from speculators import DFlash2DraftModel, DFlashDraftModel, DSparkDraftModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "eager"
    classes = {"dflash": DFlashDraftModel, "dflash2": DFlash2DraftModel, "dspark": DSparkDraftModel}
    kind = config.speculators_model_type
    config.speculators_config = None  # it names the target, whose files are not here
    model = classes[kind](config=config).float().eval()
    state = load_file(Path(head) / "model.safetensors")
    state.setdefault("lm_head.weight", inputs["lm_head"])
    missing, unexpected = model.load_state_dict({**state, "embed_tokens.weight": inputs["embed"]}, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"verifier_norm.weight", "verifier_lm_head.weight"}, missing
    model._create_mask_fn = lambda *given, **named: _float_mask(*given, **named)
    block, tokens, path = model.block_size, inputs["tokens"], inputs["path"]
    length = len(tokens) + 2 * block  # the last block of a text begins no other
    ids, anchors = torch.zeros(1, length, dtype=torch.long), torch.zeros(1, length)
    ids[0, : len(tokens)], anchors[0, len(tokens) - 1] = tokens, 1
    features = inputs["features"]
    known = torch.zeros(1, length, features.shape[-1])
    known[0, : len(features)] = features
    last = torch.zeros(1, length, model.hidden_size)
    model.verifier_lm_head.weight.data.zero_()
    hidden, logits, *_ = model._backbone_forward(
        known, ids, anchors, last, torch.zeros(1, length, dtype=torch.long), max_anchors=1
    )
    first = 0 if config.sample_from_anchor else 1
    hidden, logits = hidden[0, first:], logits[0, first:]
    if kind == "dspark" and model.markov_head is not None:
        logits = logits + model.markov_head.block_bias(prev_token_ids=path[None], hidden_states=hidden[None])[0]
    return _selected(model.candidate_selector, logits, hidden, path) if kind == "dflash2" else logits


def _float_mask(mask_mod, B=None, H=None, Q_LEN=0, KV_LEN=0, device=None):
    from speculators.models.attention import create_float_mask

    return create_float_mask(mask_mod, B=B, H=H, Q_LEN=Q_LEN, KV_LEN=KV_LEN, device=device, dtype=torch.float32)


def _selected(selector, logits: torch.Tensor, hidden: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """Logits of the candidates after these tokens; minus infinity for the others."""
    values, candidates = logits.topk(selector.top_k)
    tables = [getattr(selector, name) for name in ("predecessor_codebook", "successor_codebook")]
    before, after = (getattr(table, "weight", table) for table in tables)
    scores = values + torch.einsum("sr,skr->sk", before[path] * selector.hidden_projection(hidden), after[candidates])
    return torch.full_like(logits, -torch.inf).scatter(1, candidates, scores)


def main() -> None:
    library, heads = sys.argv[1], sys.argv[2:]
    compute = {"dflash": by_dflash, "speculators": by_speculators}[library]
    for head in heads:
        with torch.no_grad():
            logits = compute(head, load_file(Path(head) / "inputs.safetensors"))
        save_file({"logits": logits.contiguous()}, Path(head) / "logits.safetensors")


if __name__ == "__main__":
    main()
