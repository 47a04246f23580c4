"""Small random encoders through llama.cpp's converter, against ``transformers``: ``python -m tests.oracle.convert_encoders
LLAMA.CPP`` in the root of the repository.

A development script that needs what ``tests/oracle/convert.py`` needs.  The models of ``encoders.py`` and
``gemma_embedding.py`` are written as folders of sentence-transformers with small vocabularies, converted to several formats,
and loaded by this engine on the CPU with a cache of float32.  Token ids of a text are compared with those of the folder's own
tokenizer, and vectors with those that ``transformers`` computes in float64, in standard deviations.
"""

import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import sentencepiece
import torch  # type: ignore[import-not-found]
import transformers
from safetensors.torch import save_file  # type: ignore[import-not-found]
from tokenizers import BertWordPieceTokenizer, Tokenizer, models, processors

import engine
from tests.oracle import gemma_embedding, tokens
from tests.oracle.convert import run_converter
from tests.oracle.encoders import CASES, EncoderCase, golden
from tests.oracle.models import checkpoint
from tests.oracle.shared import N_CTX, N_VOCAB

TEXT = "The cats, unable — Éa [SEP] 123!"

PIECES = [
    *(
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "cat",
        "##s",
        "un",
        "##able",
        ",",
        "—",
        "ea",
        "[",
        "]",
        "sep",
    ),
    *("1", "##2", "##3", "!"),
]


def write(case: EncoderCase, folder: Path) -> list[int]:
    """Write the folder of a model.  Returns the ids of :data:`TEXT`, without those around it."""
    config = transformers.BertConfig(
        vocab_size=N_VOCAB,
        hidden_size=case.n_embd,
        num_hidden_layers=case.n_layer,
        num_attention_heads=case.n_head,
        intermediate_size=case.n_ff,
        max_position_embeddings=N_CTX,
        type_vocab_size=case.n_types,
        layer_norm_eps=case.eps,
        architectures=["BertModel"],
    )
    model = transformers.BertModel(config, add_pooling_layer=False)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in case.checkpoint().items()})
    model.save_pretrained(folder)
    pieces = [*PIECES, *(f"[unused{i}]" for i in range(N_VOCAB - len(PIECES)))]
    tokenizer = BertWordPieceTokenizer({piece: id for id, piece in enumerate(pieces)})
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "vocab.txt").write_text("\n".join(pieces), encoding="utf-8")
    special = {
        name: PIECES[i] for i, name in enumerate(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"))
    }
    about = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    modules = [{"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}', encoding="utf-8")
    ids: list[int] = tokenizer.encode(TEXT.replace("[SEP]", "[ sep ]"), add_special_tokens=False).ids
    return ids


def write_gemma(folder: Path) -> list[int]:
    """Write the folder of the model of ``gemma_embedding.py`` with its dense layers.  Returns the ids of the text of
    ``tokens.py``."""
    folder.mkdir()
    model = gemma_embedding.network(torch.float32, checkpoint(gemma_embedding.CASE))
    model.config.architectures = ["Gemma3TextModel"]
    model.save_pretrained(folder)
    modules = [{"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}', encoding="utf-8")
    for number, (name, matrix) in enumerate(gemma_embedding.dense().items(), 2):
        own = folder / f"{number}_Dense"
        own.mkdir()
        save_file({"linear.weight": torch.from_numpy(matrix)}, own / "model.safetensors")
        about = {"in_features": matrix.shape[1], "out_features": matrix.shape[0], "bias": False}
        (own / "config.json").write_text(json.dumps(about), encoding="utf-8")
        modules.append({"idx": number, "name": name, "path": own.name, "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    return tokens.write(folder, "gemma3")


UNIGRAM = "Ｔhe cats,  unable — Éa </s> 12３! ﬁn"
"""A text for XLM-RoBERTa, whose characters are mapped."""


def write_xlm_roberta(case: EncoderCase, folder: Path) -> list[int]:
    """Write the folder of an XLM-RoBERTa, with a vocabulary that ``sentencepiece`` trains.  Returns the ids of
    :data:`UNIGRAM`, without those around it."""
    config = transformers.XLMRobertaConfig(
        vocab_size=N_VOCAB,
        hidden_size=case.n_embd,
        num_hidden_layers=case.n_layer,
        num_attention_heads=case.n_head,
        intermediate_size=case.n_ff,
        max_position_embeddings=N_CTX + case.first,
        pad_token_id=case.padding,
        type_vocab_size=case.n_types,
        layer_norm_eps=case.eps,
        num_labels=case.labels or 2,
        **({"id2label": {0: "LABEL_0"}} if case.labels else {}),
    )
    weights = {name: torch.from_numpy(value) for name, value in case.checkpoint().items()}
    if case.labels:
        model = transformers.XLMRobertaForSequenceClassification(config)
        weights = {n if n.startswith("classifier.") else f"roberta.{n}": weight for n, weight in weights.items()}
    else:
        model = transformers.XLMRobertaModel(config, add_pooling_layer=False)
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([UNIGRAM, *UNIGRAM.split(), "the other cats said that they were unable to"] * 20),
        model_writer=out,
        vocab_size=N_VOCAB - 2,
        model_type="unigram",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "sentencepiece.bpe.model").write_bytes(out.getvalue())
    trained = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [(trained.IdToPiece(i), trained.GetScore(i)) for i in range(3, trained.vocab_size())]
    own = Tokenizer(models.Unigram([*((token, 0.0) for token in special), *pieces], 3, False))
    own.add_special_tokens(special)
    own.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    own.save(str(folder / "tokenizer.json"))
    names = {"bos": 0, "cls": 0, "pad": 1, "eos": 2, "sep": 2, "unk": 3}
    about = {"tokenizer_class": "XLMRobertaTokenizer", **{f"{name}_token": special[i] for name, i in names.items()}}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    if not case.labels:
        modules = [{"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
        (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}', encoding="utf-8")
    return [id + 1 if id else 3 for id in trained.encode(UNIGRAM)]


def difference(found: np.ndarray, expected: list[np.ndarray]) -> float:
    """The largest difference of two lists of vectors, in standard deviations of a vector."""
    pairs = zip(found, expected, strict=True)
    return max(float(np.abs(vector - other).max() / other.std()) for vector, other in pairs)


def check_bert(llm: engine.LLM, ids: list[int]) -> float:
    """Compare a converted BERT with the golden values: the largest difference."""
    assert llm.config.pooling == "mean" and not llm.config.causal
    assert llm.tokenizer.encode(TEXT) == [2, *ids, 3], llm.tokenizer.encode(TEXT)
    expected = [np.array(text["mean"]) for text in golden()["bert"]["texts"]]
    return difference(llm.embed(CASES["bert"].prompts(), normalize=False), expected)


def check_gemma(llm: engine.LLM, ids: list[int]) -> float:
    """The same for an EmbeddingGemma."""
    assert llm.config.pooling == "mean" and llm.config.n_dense == gemma_embedding.N_DENSE
    found = llm.tokenizer.encode(tokens.TEXT, add_special=False)
    assert found == ids, found
    expected = [np.array(text["vector"]) for text in gemma_embedding.golden()["texts"]]
    return difference(llm.embed(gemma_embedding.texts()), expected)


def check_xlm_roberta(llm: engine.LLM, ids: list[int]) -> float:
    """The same for an XLM-RoBERTa."""
    assert llm.config.pooling == "cls" and not llm.config.causal
    assert llm.tokenizer.encode(UNIGRAM) == [0, *ids, 2], llm.tokenizer.encode(UNIGRAM)
    expected = [np.array(text["cls"]) for text in golden()["xlm-r"]["texts"]]
    return difference(llm.embed(CASES["xlm-r"].prompts(), normalize=False), expected)


def check_reranker(llm: engine.LLM, ids: list[int]) -> float:
    """The same for a reranker, whose scores are compared: the largest difference, in standard deviations of the scores."""
    assert llm.config.pooling == "rank" and llm.rerank_prompt is not None
    found = llm.rerank_prompt.ids(UNIGRAM, UNIGRAM)
    assert found == [0, *ids, 2, 2, *ids, 2], found
    scores = llm.scores(llm.pooled(CASES["xlm-r-rank"].prompts()))
    expected = np.array([text["scores"][0] for text in golden()["xlm-r-rank"]["texts"]])
    return float(np.abs(scores - expected).max() / expected.std())


MODELS: dict[str, tuple[Callable[[Path], list[int]], Callable[[engine.LLM, list[int]], float], list[str]]] = {
    "bert": (lambda folder: write(CASES["bert"], folder), check_bert, []),
    "xlm-r": (lambda folder: write_xlm_roberta(CASES["xlm-r"], folder), check_xlm_roberta, []),
    "xlm-r-rank": (lambda folder: write_xlm_roberta(CASES["xlm-r-rank"], folder), check_reranker, []),
    "gemma-embedding": (write_gemma, check_gemma, ["--sentence-transformers-dense-modules"]),
}
"""For each model: what writes its folder, what compares its file, and further arguments of the converter."""


def main(llama_cpp: str) -> None:
    """Convert, compare and print."""
    formats = ("f32", "f16", "bf16", "q8_0")
    for name, (write_folder, check, further) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "hf"
            ids = write_folder(source)
            fixed = [str(source), *further, "--outfile"]
            calls = [[*fixed, f"{folder}/{kind}.gguf", "--outtype", kind] for kind in formats]
            ends = run_converter(Path(llama_cpp), calls, Path(folder) / "log.txt")
            for kind, end in zip(formats, ends, strict=True):
                if end:
                    sys.stdout.write(f"{name} {kind}: {end}\n")
                    continue
                with engine.load(f"{folder}/{kind}.gguf", device="cpu", cache_type="f32") as llm:
                    worst = check(llm, ids)
                sys.stdout.write(f"{name} {kind}: ids the same, largest difference {worst:.1e} standard deviations\n")


if __name__ == "__main__":
    main(sys.argv[1])
