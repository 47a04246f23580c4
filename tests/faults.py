"""Faults planted on purpose, one at a time, and the tests of .ci/run that find them.

    python -m tests.faults                  plant all faults, in copies of the tree; exit status 1 if one is not found
    python -m tests.faults -k barrier -j 4  those whose name, room or file contains "barrier", four at a time
    python -m tests.faults --list           list the faults

Each is a plausible mistake that would not be obvious in generated text. ``tests/test_faults.py`` checks that the list matches
the sources.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.copies import Outcome, Runner, write_table


@dataclass(frozen=True)
class Fault:
    """A change that makes a part of the engine wrong.

    old: a text that occurs once in the file; new: its replacement; why: the effect on a user; tests: arguments of pytest, the
    fastest first.
    """

    name: str
    room: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]

    def apply(self, text: str) -> str:
        """The text of the file with the fault.  Raises ValueError unless ``old`` occurs exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"fault '{self.name}': {self.file} has its text {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


FAULTS = (
    # --- files ---------------------------------------------------------------------------------------------------
    Fault(
        "tensors that overlap",
        "files",
        "engine/gguf/header.py",
        "if entry.offset < expected:",
        "if entry.offset < 0:",
        "in a damaged or hostile file, two tensors share bytes, and the model generates nonsense",
        ("tests/gguf/test_gguf.py::test_bad_offsets",),
    ),
    Fault(
        "a tensor that ends after its file",
        "files",
        "engine/gguf/header.py",
        "if end > available:",
        "if end > available + 32:",
        "the last weights of a truncated file are missing",
        ("tests/gguf/test_gguf.py::test_every_truncation_is_refused",),
    ),
    Fault(
        "the scale that is checked",
        "files",
        "engine/gguf/file.py",
        '_half("dmin", 82)',
        '_half("dmin", 80)',
        "an infinite scale passes the check of tensors, and all logits are NaN",
        ("tests/gguf/test_gguf_scales.py",),
    ),
    # --- formats -------------------------------------------------------------------------------------------------
    Fault(
        "the scale of a sub-block, CPU",
        "formats",
        "engine/cpu/products/unpack.py",
        "[x & 63, z & 15 | x.bits(2, 48)]",
        "[x & 63, z & 15 | x.bits(1, 48)]",
        "half of the sub-blocks of Q4_K and Q5_K have wrong scales, but the text still looks correct",
        ("tests/gguf/test_quants.py::test_dequantization_is_that_of_gguf_byte_for_byte",),
    ),
    Fault(
        "the scale of a sub-block, GPU",
        "formats",
        "engine/cuda/products/unpack.py",
        "u32((h3 & low) | ((h1 >> u32(2)) & high))",
        "u32((h3 & low) | ((h2 >> u32(2)) & high))",
        "on a GPU, bits of a minimum become part of a scale, but the text still looks correct",
        ("tests/cuda/simulated/test_operations.py::test_matmul",),
    ),
    Fault(
        "an exponent of MXFP4",
        "formats",
        "engine/cpu/products/unpack.py",
        "(e - 1) << 23",
        "e << 23",
        "the table of the format contains doubled values, so all weights of a tensor are twice too large",
        ("tests/gguf/test_quants.py::test_dequantization_is_that_of_gguf_byte_for_byte",),
    ),
    Fault(
        "rows of a record that are exchanged",
        "formats",
        "engine/cpu/products/repack.py",
        "code.store(code.load(place, 0, lane, 1), to, r * lane.width // 8)",
        "code.store(code.load(place, 0, lane, 1), to, (r ^ 1) * lane.width // 8)",
        "every second row of a matrix is exchanged with its neighbour, and the model generates nonsense",
        ("tests/gguf/test_quants.py::test_dequantization_is_that_of_gguf_byte_for_byte",),
    ),
    Fault(
        "the last rows of a matrix",
        "formats",
        "engine/cpu/products/repack.py",
        "if r < count else 0",
        "if r < count - 1 else 0",
        "if the rows of a matrix do not fill a record, the last row is zero, so one token can never be sampled",
        ("tests/cpu/test_repack.py",),
    ),
    Fault(
        "where repacked rows lie",
        "formats",
        "engine/cuda/products/repack.py",
        '"Q8_0": lambda b: _join(_lane_plane(b.quants, b.quants + 16), _row_plane(b.factors, 2))',
        '"Q8_0": lambda b: _join(_lane_plane(b.quants + 16, b.quants), _row_plane(b.factors, 2))',
        "weights are stored at other addresses than those that the kernel reads",
        ("tests/cuda/simulated/test_operations.py::test_matmul",),
    ),
    # --- text ----------------------------------------------------------------------------------------------------
    Fault(
        "control tokens in what people write",
        "text",
        "engine/text/tokenizer.py",
        "marks = None if token in self.anywhere else trusted",
        "marks = None",
        "a user who writes <|im_end|> ends their turn and can write system messages",
        ("tests/text/test_tokenizer.py::test_control_tokens_only_where_asked_for",),
    ),
    Fault(
        "marks of joined texts",
        "text",
        "engine/text/template/marked.py",
        "marks_of(other) + self.marks",
        "self.marks + marks_of(other)",
        "marks move from the text of the template to the text of the user",
        ("tests/text/template/test_marked.py",),
    ),
    # --- scalar functions ----------------------------------------------------------------------------------------
    Fault(
        "a contraction in exp",
        "numerics",
        "engine/numerics.py",
        "p = fma(p, r * r, r) + _ONE",
        "p = p * (r * r) + r + _ONE",
        "there are two roundings instead of one; a compiler for GPUs may fuse them, and a compiler for CPUs may not",
        ("tests/cuda/test_ptx.py::test_kernel -k activate-0-sm_90",),
    ),
    Fault(
        "the counter of the noise",
        "numerics",
        "engine/numerics.py",
        "(u64(position) + u64(1))",
        "u64(position)",
        "the noise is that of another position, so a seed gives a different text",
        ("tests/test_numerics.py::test_uniform_equals_integer_arithmetic",),
    ),
    # --- products ------------------------------------------------------------------------------------------------
    Fault(
        "the order of the chains, CPU",
        "products",
        "engine/cpu/products/law.py",
        "    with code.loop(units, 0, length) as first:\n",
        "    begin = code.builder.sdiv(code.builder.sub(units, ir.Constant(I64, 1)), length)\n"
        "    with code.loop(units, 0, length) as place:\n"
        "        first = code.builder.sub(code.builder.mul(begin, length), place)\n",
        "the same numbers are added in a different order than on a GPU",
        ("tests/cpu/test_matmul.py::test_the_dot_product_rounds_exactly_where_the_contract_says",),
    ),
    Fault(
        "a product and a sum in place of fma, CPU",
        "products",
        "engine/cpu/products/law.py",
        "values.append(dm.fma(terms.to_float(), d * x.to_float()))",
        "values.append(dm * terms.to_float() + d * x.to_float())",
        "there is an additional rounding, only in formats with a minimum",
        ("tests/cpu/test_matmul.py::test_the_dot_product_rounds_exactly_where_the_contract_says",),
    ),
    Fault(
        "one sum too many in 16 bits",
        "products",
        "engine/cpu/products/law.py",
        "return (2**15 - 1) // (2 * self.fmt.largest * ACTIVATION_MAX)",
        "return (2**15 - 1) // (2 * self.fmt.largest * ACTIVATION_MAX) + 1",
        "on a CPU without VNNI, sums of large weights and large activations with the same sign overflow",
        (
            "tests/cpu/test_matmul.py::test_no_sum_overflows",
            "tests/cpu/test_matmul.py::test_the_worst_case_does_not_overflow",
        ),
    ),
    Fault(
        "the order of the chains, GPU",
        "products",
        "engine/cuda/products/matmul.py",
        "total = total + parts[c * (16 * n_columns) + i]",
        "total = total + parts[(CHAINS - 1 - c) * (16 * n_columns) + i]",
        "the same numbers are added in a different order than on a CPU",
        ("tests/cuda/simulated/test_operations.py::test_matmul",),
    ),
    Fault(
        "a barrier before warps read each other's sums",
        "products",
        "engine/cuda/products/matmul.py",
        "        cuda.syncthreads()\n        i = thread\n",
        "        i = thread\n",
        "a warp occasionally adds sums that another warp has not written yet",
        ("tests/cuda/simulated/test_operations.py::test_matmul",),
    ),
    Fault(
        "where a chain ends in a prompt's product",
        "products",
        "engine/cuda/products/wide_chain.py",
        "if (u + 1) % length == 0 or u + 1 == units:",
        "if (u + 1) % (length + 1) == 0 or u + 1 == units:",
        "results of prompts on tensor cores differ from those of the same tokens read one by one",
        ("tests/cuda/simulated/test_wide_matmul.py::test_formats",),
    ),
    # --- norms and rotations ---------------------------------------------------------------------------------------
    Fault(
        "the tree of partial sums",
        "norms",
        "engine/cpu/fold.py",
        "lanes[j] = lanes[j] + lanes[j + half]",
        "lanes[j] = lanes[2 * j] + lanes[2 * j + 1]",
        "the same numbers are added by another tree, in norms, attention and products of floats",
        ("tests/cpu/test_operations.py::test_a_sum_of_squares_has_the_documented_order",),
    ),
    Fault(
        "the wrong lane in a shuffle",
        "norms",
        "engine/cuda/fold.py",
        "x = x + lane_xor(x, I(8))",
        "x = x + lane_xor(x, I(4))",
        "some lanes are added twice, and others are not added",
        ("tests/cuda/simulated/test_operations.py::test_norms",),
    ),
    Fault(
        "a product and a sum in place of fma, GPU",
        "norms",
        "engine/cuda/rms_norm.py",
        "y[row + i] = fma(x[row + i] * r, weight[i], residual[row + i]) * scale",
        "y[row + i] = (x[row + i] * r * weight[i] + residual[row + i]) * scale",
        "the compiler may or may not fuse the two operations",
        (
            "tests/cuda/test_ptx.py::test_kernel -k rms_norm_add-0-sm_90",
            "tests/cuda/simulated/test_operations.py::test_norms",
        ),
    ),
    Fault(
        "a contraction in a rotation",
        "norms",
        "engine/cpu/rope.py",
        "out_ones[i] = fma(a, cos[i], -(b * sin[i]))",
        "out_ones[i] = a * cos[i] - b * sin[i]",
        "there is an additional rounding, so keys in the cache differ in the last bit",
        ("tests/cuda/simulated/test_rope.py::test_heads",),
    ),
    Fault(
        "a sum of squares that overflows",
        "norms",
        "engine/numerics.py",
        "return unless_overflow(total, f32(1.0) / f32(math.sqrt(f32(total / n + eps))))",
        "return f32(1.0) / f32(math.sqrt(f32(total / n + eps)))",
        "a row that overflows in a norm becomes 0, and the answer is empty without an error message",
        (
            "tests/test_numerics.py::test_a_sum_of_squares_that_overflows_gives_no_factor",
            "tests/cpu/test_overflow.py::test_it_shows_in_its_row",
        ),
    ),
    Fault(
        "a norm on a GPU that hides an overflow",
        "norms",
        "engine/cuda/rms_norm.py",
        "            y[row + i] = x[row + i] * r * weight[i]",
        "            y[row + i] = x[row + i] * (r if r > f32(0.0) else f32(0.0)) * weight[i]",
        "on a GPU, an overflow in a norm is not reported, while the CPU reports it",
        ("tests/cuda/simulated/test_overflow.py::test_it_shows_in_its_row",),
    ),
    Fault(
        "a limit that hides what is not finite",
        "numerics",
        "engine/numerics.py",
        "    limit = unless_overflow(x, limit)\n    return x if x < limit else limit",
        "    return x if x < limit else limit",
        "a gate of gpt-oss that is NaN is replaced by 7, and the answer is wrong without an error message",
        ("tests/test_numerics.py::test_what_is_not_finite_passes_no_activation",),
    ),
    Fault(
        "a key that float16 cannot represent",
        "attention",
        "engine/numerics.py",
        "return float_to_half(x) if abs(x) < HALF_END else _HALF_NAN",
        "return float_to_half(x)",
        "a key above 65504 becomes infinite; if its score is -inf, the position is ignored",
        ("tests/test_numerics.py::test_what_is_stored_as_float16_is_finite_or_nan",),
    ),
    Fault(
        "a scale of integers that float16 cannot represent",
        "quantized caches",
        "engine/cpu/integer_cache.py",
        "    scale = float_to_half(top) if top < HALF_END else overflowed",
        "    scale = float_to_half(min(top, f32(65504.0))) if top < f32(np.inf) else overflowed",
        "with an i8 cache, keys above 8.3 million become smaller, and the answer is wrong without an error message",
        (
            "tests/cpu/test_integer_cache.py::test_blocks_are_those_of_the_law",
            "tests/models/test_overflow.py::test_keys_that_a_cache_cannot_represent_are_said",
        ),
    ),
    Fault(
        "a scale of integers that float16 cannot represent, GPU",
        "quantized caches",
        "engine/cuda/integer_cache.py",
        "            scale = float_to_half(top)\n            if not top < HALF_END:",
        "            scale = float_to_half(min(top, F(65504.0)))\n            if not top < F(np.inf):",
        "on a GPU, an overflow in the cache is not reported, while the CPU reports it",
        ("tests/cuda/simulated/test_overflow.py::test_it_shows_in_its_row",),
    ),
    Fault(
        "a value of integers that is not finite, GPU",
        "quantized caches",
        "engine/cuda/integer_cache.py",
        "            if not top < HALF_END:",
        "            if top > HALF_END:",
        "a NaN value is stored as integers with the largest scale",
        ("tests/cuda/simulated/test_overflow.py::test_it_shows_in_its_row",),
    ),
    Fault(
        "a draft model that overflows",
        "speculation",
        "engine/speculative/draft_model.py",
        "        except (NoToken, NotFinite):",
        "        except NoToken:",
        "a damaged draft model ends the answers of an undamaged target",
        ("tests/models/test_overflow.py::test_a_draft_model_that_overflows_drafts_nothing",),
    ),
    # --- attention -----------------------------------------------------------------------------------------------
    Fault(
        "a mask off by one",
        "attention",
        "engine/cpu/attention.py",
        "min(CHUNK, position - chunk * CHUNK + 1)",
        "min(CHUNK, position - chunk * CHUNK + 2)",
        "a token sees the next token, which is already stored if both are in the same batch",
        (
            "tests/cpu/test_attention.py::test_against_float64",
            "tests/cpu/test_attention.py::test_hidden_lanes_never_show",
        ),
    ),
    Fault(
        "a window off by one",
        "attention",
        "engine/cpu/attention.py",
        "return max(0, position - window + 1) if window > 0 else 0",
        "return max(0, position - window) if window > 0 else 0",
        "layers with a sliding window see an additional position",
        ("tests/cpu/test_attention.py::test_against_float64",),
    ),
    Fault(
        "keys of another sequence",
        "attention",
        "engine/cpu/attention.py",
        "while end < sequences.size and sequences[end] == sequences[t]:",
        "while end < sequences.size:",
        "in a pass over several sequences, all rows attend to the positions of the first sequence",
        ("tests/cpu/test_attention.py::test_rows_of_several_sequences_are_those_computed_alone",),
    ),
    Fault(
        "chunks joined in one level",
        "attention",
        "engine/cpu/attention.py",
        "if (chunk + 1) % group == 0 or chunk + 1 == end:",
        "if chunk + 1 == end:",
        "the same chunks are joined in a different order: the numbers are nearly the same, but the bits differ",
        ("tests/cpu/test_attention.py::test_chunks_are_joined_in_groups",),
    ),
    Fault(
        "a mask off by one, GPU",
        "attention",
        "engine/cuda/attention/weigh.py",
        "min(I(place - chunk * CHUNK + 1), I(CHUNK))",
        "min(I(place - chunk * CHUNK), I(CHUNK))",
        "a token does not see itself",
        ("tests/cuda/simulated/test_attention.py::test_decode",),
    ),
    Fault(
        "a barrier between scores and weights",
        "attention",
        "engine/cuda/attention/attend.py",
        "            score(chunk_keys, scaled, scores, thread, n)\n            cuda.syncthreads()\n",
        "            score(chunk_keys, scaled, scores, thread, n)\n",
        "a warp computes the maximum of scores that other warps have not written yet",
        ("tests/cuda/simulated/test_attention.py::test_decode",),
    ),
    Fault(
        "a maximum that is forgotten",
        "attention",
        "engine/cuda/attention/combine.py",
        "before = max(maximum, before) if lane > 0 else maximum",
        "before = before if lane > 0 else maximum",
        "groups are joined 32 at a time, and only the first of each 32 is joined to earlier ones with correct factors",
        ("tests/cuda/simulated/test_attention.py::test_more_groups_than_are_joined_at_once",),
    ),
    Fault(
        "groups counted from what a row sees",
        "attention",
        "engine/cuda/attention/join.py",
        "I(first_chunk & last), I(cuda.blockIdx.z * LANES)",
        "I(0), I(cuda.blockIdx.z * LANES)",
        "with a window, chunks are joined in other groups on the GPU, so the last bits of attention differ",
        ("tests/cuda/simulated/test_attention.py::test_chunks_joined_and_quantized",),
    ),
    Fault(
        "a run of chunks that no block takes",
        "attention",
        "engine/cuda/attention/join.py",
        "before = I(before + cuda.gridDim.z * LANES)",
        "before = I(before + cuda.gridDim.z * LANES * LANES)",
        "if a row sees more chunks than the blocks join at once, the others are ignored, only in long contexts",
        ("tests/cuda/simulated/test_attention.py::test_chunks_joined_and_quantized",),
    ),
    Fault(
        "integers that lose their sign",
        "attention",
        "engine/cpu/integer_products.py",
        "one, other = one.arithmetic_shift(4), other.arithmetic_shift(4)",
        "one, other = one >> 4, other >> 4",
        "negative sums of products of i12 become large, so attention reads the wrong positions",
        ("tests/cpu/test_integer_cache.py::test_sums_of_products_are_exact",),
    ),
    Fault(
        "scales of hidden positions",
        "attention",
        "engine/cpu/integer_attention.py",
        "w[j] = p[j] * d[j] if p[j] > f32(0.0) else f32(0.0)",
        "w[j] = p[j] * d[j]",
        "entries of an earlier answer in a ring cause NaN or affect the rounding of weights",
        ("tests/cpu/test_integer_cache.py::test_weights_are_those_of_the_law",),
    ),
    Fault(
        "chunks counted from what another row sees",
        "attention",
        "engine/cuda/attention/integer_steps.py",
        "I(chunk - (first_visible(other_position, window) >> 6))",
        "I(chunk - (first_visible(position, window) >> 6))",
        "with a window and drafts, results of chunks are stored in wrong places if rows are on both sides of a border",
        ("tests/cuda/simulated/test_integer_attention.py::test_windows_and_sinks_of_steps",),
    ),
    Fault(
        "a group that ends one chunk early",
        "attention",
        "engine/cuda/attention/integer_tiled.py",
        "chunk = I(chunk + 1)\n            if I(U(chunk) % U(joined)) == 0",
        "chunk = I(chunk + 1)\n            if I(U(chunk + 1) % U(joined)) == 0",
        "prefill and decode join different groups, so the last bits depend on how a text is divided into passes",
        ("tests/cuda/simulated/test_integer_attention.py::test_groups_of_chunks",),
    ),
    Fault(
        "a latent that is not visible yet",
        "attention",
        "engine/cuda/attention/latent.py",
        "if lane >= last:\n                s = F(-np.inf)",
        "if lane > last:\n                s = F(-np.inf)",
        "in the first half of a chunk, a token sees the next latent, from another row or an earlier answer",
        ("tests/cuda/simulated/test_latent.py::test_chunks",),
    ),
    Fault(
        "the last latent of a row, CPU",
        "attention",
        "engine/cpu/latent_attention.py",
        "end = positions[t] + 1",
        "end = positions[t]",
        "with latent attention, a token does not see itself",
        ("tests/cpu/test_latent_attention.py::test_law",),
    ),
    # --- caches --------------------------------------------------------------------------------------------------
    Fault(
        "the snapshot of another text",
        "caches",
        "engine/cache/sequence.py",
        "rest[at : at + size], key=key, digest_size=32)",
        "rest[at : at + size], digest_size=32)",
        "a conversation continues from the state of another text that only has the last 64 tokens in common",
        ("tests/models/test_recurrent.py::test_snapshots_keep_to_their_budget",),
    ),
    Fault(
        "a page given back too early",
        "caches",
        "engine/cache/pages.py",
        "return max(0, length - (self.window - 1 + self.spare)) // self.span",
        "return max(0, length - (self.window - 1)) // self.span",
        "drafts cannot be rolled back if a window has just passed a page, and the answer ends with an error",
        ("tests/cache/test_cache.py::test_windows_can_always_be_rolled_back",),
    ),
    Fault(
        "a page of a window that is still seen",
        "caches",
        "engine/cache/pages.py",
        "return max(0, length - (self.window - 1 + self.spare)) // self.span",
        "return -(-max(0, length - (self.window - 1)) // self.span)",
        "new tokens overwrite the oldest tokens that a window still sees",
        ("tests/models/test_gemma4.py::test_chunks_threads_and_what_is_taken_back_do_not_show",),
    ),
    Fault(
        "a page for two sequences",
        "caches",
        "engine/cache/sequence.py",
        "return length % paging.span == 0 or not self._cache.pools[paging].shared(held[length // paging.span])",
        "return True",
        "an answer writes to a page that another answer reads, which then continues from wrong tokens",
        ("tests/models/test_mixed_passes.py::test_shared_pages_are_not_written_to",),
    ),
    Fault(
        "what another user has read",
        "caches",
        "engine/cache/sequence.py",
        "            self.truncate(0)\n            self.salt",
        "            self.salt",
        "the response time of a prefix shows whether another user has sent the same prefix before",
        ("tests/decode/test_salts.py::test_a_slot_keeps_less_than_a_page_for_its_salt",),
    ),
    Fault(
        "the table of another sequence",
        "caches",
        "engine/models/base.py",
        "slots += [sequence.slot] * count",
        "slots += [0] * count",
        "users whose answers are computed together get each other's texts, depending on the order of requests",
        ("tests/models/test_mixed_passes.py -k windows",),
    ),
    Fault(
        "a page too few",
        "caches",
        "engine/cache/pages.py",
        "return min(chunks, -(-(self.window - 1 + self.spare + rows) // self.span) + 1)",
        "return min(chunks, -(-(self.window - 1 + self.spare + rows) // self.span))",
        "a prompt that is read from the middle of a page has no page for its last rows",
        ("tests/cache/test_cache.py::test_sliding_layers_hold_only_their_window",),
    ),
    Fault(
        "memory of pages that are in use",
        "caches",
        "engine/cpu/backend.py",
        "for first, end in free[paged.pool])",
        "for first, end in [(0, n_pages)])",
        "after ten idle seconds, a conversation continues with keys and values that are zero",
        ("tests/cpu/test_mapping.py::test_free_pages_go_back_and_no_bit_changes",),
    ),
    Fault(
        "a part of a neighbouring page",
        "caches",
        "engine/cpu/mapping.py",
        "low, high = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE,",
        "low, high = first // mmap.PAGESIZE * mmap.PAGESIZE,",
        "with quantized caches, whose pages have arbitrary borders, keys next to free pages become zero",
        ("tests/cpu/test_mapping.py::test_ranges_go_back",),
    ),
    Fault(
        "the snapshots that are forgotten",
        "caches",
        "engine/cache/recurrent.py",
        "if key not in keys]",
        "if key in keys]",
        "after a pause, conversations of hybrid models are read again, and memory is occupied by other texts",
        ("tests/models/test_recurrent.py::test_snapshots_keep_to_their_budget",),
    ),
    Fault(
        "taken back one position too far",
        "caches",
        "engine/cache/sequence.py",
        "length - ring.back >= oldest or oldest == 0",
        "length - ring.back >= oldest - 1 or oldest == 0",
        "a sequence is truncated to a length at which its window has already been overwritten",
        (
            "tests/cache/test_cache.py::test_rewinding",
            "tests/models/test_recurrent.py::test_how_far_tokens_can_be_taken_back",
        ),
    ),
    # --- delta net -----------------------------------------------------------------------------------------------
    Fault(
        "the wrong half of the tokens of the block before",
        "compressed rows",
        "engine/cpu/compressor.py",
        "at = (overlap - 1) * d if p >= r * ratio else 0",
        "at = (overlap - 1) * d",
        "rows of most layers are computed from other values than in training: the text is worse, but not wrong",
        ("tests/cpu/test_compressed.py::test_compressed_rows_against_float64",),
    ),
    Fault(
        "rows as good as the last chosen one come first",
        "compressed rows",
        "engine/cpu/indexer.py",
        "if key > least or (key == least and equal > 0):",
        "if key >= least and count < top_k:",
        "if scores are equal, a better row is not selected, only in texts with many rows",
        ("tests/cpu/test_compressed.py::test_the_threshold_is_exact",),
    ),
    Fault(
        "compressed rows in the group of the window",
        "compressed rows",
        "engine/cpu/compressed_attention.py",
        "            end_group(n, sums, inner, result)\n            low =",
        "            low =",
        "compressed rows are joined with the first chunks of the window, so bits depend on the number of rows",
        ("tests/cuda/simulated/test_compressed.py::test_attention",),
    ),
    Fault(
        "a window that is too wide",
        "compressed rows",
        "engine/cuda/compressed_attention.py",
        "            a, b = visible(position, window, number)\n        if b > 0:",
        "            a, b = visible(position, window + 1, number)\n        if b > 0:",
        "a token sees one more latent than on the CPU, and the ring may have overwritten it",
        ("tests/cuda/simulated/test_compressed.py::test_attention",),
    ),
    Fault(
        "values in place of scores",
        "compressed rows",
        "engine/cuda/compressor.py",
        "b = scores[place] if p >= start else pending[old + width]",
        "b = scores[place] if p >= start else pending[old]",
        "tokens of earlier passes have wrong weights in a compressed row, so the text depends on the passes",
        ("tests/cuda/simulated/test_compressed.py::test_compressed_rows",),
    ),
    Fault(
        "rows that count as equal",
        "compressed rows",
        "engine/cuda/indexer.py",
        "equal = I(equal + I(key == least))",
        "equal = I(equal + I(key >= least))",
        "the last row that should be selected is ignored if a better row is before it",
        ("tests/cuda/simulated/test_compressed.py::test_chosen_rows",),
    ),
    Fault(
        "one round of normalization too many",
        "compressed rows",
        "engine/cuda/hyper.py",
        "for _ in range(rounds - 1):",
        "for _ in range(rounds):",
        "the last digits of the weights of streams differ from those on the CPU",
        ("tests/cuda/simulated/test_compressed.py::test_hyper_connections",),
    ),
    Fault(
        "streams that are exchanged",
        "compressed rows",
        "engine/cpu/hyper.py",
        "c, stream = weights[t, 2 * STREAMS + STREAMS * s + d]",
        "c, stream = weights[t, 2 * STREAMS + STREAMS * d + s]",
        "the matrix between streams is transposed; its rows and columns all add up to 1, so the text looks correct",
        ("tests/cpu/test_compressed.py::test_streams_against_float64",),
    ),
    Fault(
        "the state of another segment",
        "delta net",
        "engine/cpu/delta_net.py",
        "new = own_states[(n + 1) % segments, h]",
        "new = own_states[(n + 2) % segments, h]",
        "tokens after a segment continue from an old state, only in texts of more than 16 tokens",
        ("tests/cpu/test_delta_net.py::test_the_law",),
    ),
    Fault(
        "a barrier before the weights of tokens are read",
        "delta net",
        "engine/cuda/delta_net.py",
        "            cuda.syncthreads()\n            t = first\n",
        "            t = first\n",
        "a token is computed with weights that other warps have not written yet",
        ("tests/cuda/simulated/test_delta_net.py::test_passes",),
    ),
    Fault(
        "a decay of the token itself",
        "delta net",
        "engine/cuda/delta_net.py",
        "new_decay = F(1.0)",
        "new_decay = new_decays[t + p]",
        "on the GPU, the update of the state by a token is multiplied by the decay of this token",
        ("tests/cuda/simulated/test_delta_net.py::test_passes",),
    ),
    # --- experts -------------------------------------------------------------------------------------------------
    Fault(
        "ties between experts, CPU",
        "experts",
        "engine/cpu/products/experts.py",
        "keys[e] = pack(finite(logits[t, e]), e)",
        "keys[e] = pack(finite(logits[t, e]), n_expert - e)",
        "if two experts have equal logits, the wrong one is chosen",
        ("tests/cpu/test_experts.py::test_route",),
    ),
    Fault(
        "ties between experts, GPU",
        "experts",
        "engine/cuda/products/router.py",
        "chosen = I(-lanes_max(I(-place) if best == top else I(LOWEST)))",
        "chosen = lanes_max(I(place) if best == top else I(LOWEST))",
        "if logits are equal, the devices choose different experts",
        ("tests/cuda/simulated/test_router.py::test_route",),
    ),
    # --- sampler -------------------------------------------------------------------------------------------------
    Fault(
        "noise by place in place of token",
        "sampler",
        "engine/cpu/sample.py",
        "x = x + gumbel(seed, position, ids[i])",
        "x = x + gumbel(seed, position, i)",
        "the token that is sampled depends on the filters before the draw",
        ("tests/decode/test_sampler.py::test_draw_is_the_argmax_of_logit_and_noise",),
    ),
    Fault(
        "the bound of min-p",
        "sampler",
        "engine/cpu/sample.py",
        "if values[i] >= least:",
        "if values[i] > least:",
        "a token whose probability is exactly at the bound is removed",
        ("tests/decode/test_sampler.py::test_min_p_keeps_what_is_at_its_bound",),
    ),
    Fault(
        "two uses of one noise",
        "sampler",
        "engine/cpu/accept.py",
        "uniform(u64(seed) ^ ACCEPT_SEED, position, x)",
        "uniform(u64(seed), position, x)",
        "a draft is accepted by the same noise with which it was drawn, which changes the distribution",
        ("tests/speculative/test_accept.py::test_ratio_preserves_the_distribution",),
    ),
    Fault(
        "noise that excludes and draws",
        "sampler",
        "engine/cpu/xtc.py",
        "uniform(u64(seed) ^ XTC_SEED, position, 0)",
        "uniform(u64(seed), position, 0)",
        "XTC removes tokens that the noise favours, so the remaining tokens do not have their probabilities",
        ("tests/decode/test_xtc.py::test_how_often_it_strikes",),
    ),
    Fault(
        "the end of a stretch that was compared",
        "sampler",
        "engine/cpu/dry.py",
        "if k + same >= right:",
        "if k + same > right:",
        "repetitions within repetitions are considered too short, so their penalties are too small",
        ("tests/decode/test_dry.py::test_dry_is_its_description",),
    ),
    Fault(
        "candidates for another position",
        "sampler",
        "engine/sampling/sampler.py",
        "_checked_position(len(history) if position is None else position)",
        "_checked_position(0 if position is None else position)",
        "with ratio and p-min, XTC removes tokens at all positions of an answer or at no position",
        ("tests/speculative/test_repetition_and_exclusion.py::test_what_is_drawn_from_depends_on_the_position",),
    ),
    Fault(
        "a parameter that the GPU ignores",
        "sampler",
        "engine/decode/device_params.py",
        "if params.penalizes_repetitions or params.excludes_top_choices or params.logits_processors:\n        return False",
        "if params.penalizes_repetitions or params.excludes_top_choices or params.logits_processors:\n        pass",
        "DRY, XTC and logits processors have no effect on a GPU",
        ("tests/cuda/simulated/test_sample.py::test_supported",),
    ),
    # --- batching ------------------------------------------------------------------------------------------------
    Fault(
        "steps in the memory of a prompt",
        "batching",
        "engine/cuda/runtime/recorder.py",
        "self._pool = self._pools[role]",
        "self._pool = self._pools[Role.DECODE]",
        "if answers are running, the steps overwrite the intermediate results of a prompt that is being read",
        ("tests/cuda/simulated/test_passes.py::test_passes_run_between_the_pieces_of_another",),
    ),
    Fault(
        "a pass that begins in the memory of another",
        "batching",
        "engine/cuda/backend.py",
        "            self._split.finish()\n",
        "            self._split = None\n",
        "a prompt that is being read in pieces is wrong if another thread calls llm.logits",
        ("tests/cuda/simulated/test_passes.py::test_passes_run_between_the_pieces_of_another",),
    ),
    Fault(
        "logits that are read after the next step",
        "batching",
        "engine/decode/prefill_queue.py",
        "current.n_logits and self._beside and current.pieces > 1",
        "current.n_logits and self._beside",
        "the first token of an answer is sampled from the logits of another answer",
        ("tests/cuda/simulated/test_speculation.py::test_a_prompt_of_one_token_beside_an_answer",),
    ),
    Fault(
        "a request that gives way and goes on reading",
        "batching",
        "engine/decode/running_batch.py",
        "            state.cancel()\n",
        "            pass\n",
        "a preempted request continues to write a slice of its prompt to pages that other requests have received",
        ("tests/decode/test_running_batch.py::test_a_part_of_a_prompt_is_left_in_the_middle",),
    ),
    Fault(
        "an order that is carried out at once",
        "batching",
        "engine/decode/core.py",
        "        self._orders.give(order, request)\n",
        "        self._orders.give(order, request)\n        self._obey()\n",
        "a client that disconnects during a pass frees the slot and pages that the pass writes to",
        ("tests/decode/test_orders.py::test_an_answer_is_collected_anywhere_in_a_round",),
    ),
    Fault(
        "a paused answer that keeps its slot",
        "batching",
        "engine/decode/preemption.py",
        "return [request for request in requests if request.paused]",
        "return []",
        "a few clients that do not read block all other clients until they are disconnected",
        ("tests/decode/test_orders.py::test_a_paused_answer_gives_its_slot_to_one_that_waits",),
    ),
    Fault(
        "who comes back is the last one",
        "batching",
        "engine/decode/waiting_queue.py",
        "self.requests.insert(at, request)",
        "self.requests.append(request)",
        "an answer that is preempted repeatedly waits behind all later requests and may never be completed",
        ("tests/decode/test_orders.py::test_an_answer_that_goes_on_waits_in_the_order_of_arrival",),
    ),
    Fault(
        "results of a pass that has failed",
        "batching",
        "engine/decode/core.py",
        "        self.scheduler.drop()\n",
        "",
        "after an unexpected error, answers get tokens from a pass that was started before it",
        ("tests/decode/test_recovery.py::test_after_any_other_error_all_requests_are_read_again",),
    ),
    Fault(
        "an error that is held against all",
        "batching",
        "engine/decode/core.py",
        "requests, error = list(error.requests), error.error",
        "error = error.error",
        "a request that causes an error in every pass ends all other running answers",
        ("tests/decode/test_recovery.py::test_an_answer_that_breaks_every_pass_ends_alone",),
    ),
    Fault(
        "steps in flight after an error",
        "batching",
        "engine/decode/device_steps.py",
        "        while self._in_flight:\n            for running, _ in self._in_flight[0].requests:\n",
        "        while False:\n            for running, _ in self._in_flight[0].requests:\n",
        "after an unexpected error, answers on a GPU get tokens of passes that were started before it",
        ("tests/cuda/simulated/test_steps.py::test_all_answers_begin_again_after_an_error",),
    ),
    Fault(
        "a mask whose words are read from the other end",
        "batching",
        "engine/cuda/permit.py",
        "(bits[i >> 5] >> (i & 31)) & 1 == 0",
        "(bits[i >> 5] >> (31 - (i & 31))) & 1 == 0",
        "an answer on a GPU contains tokens that its schema forbids",
        ("tests/cuda/simulated/test_masks.py",),
    ),
    # --- speculation ---------------------------------------------------------------------------------------------
    Fault(
        "a draft accepted that is not the target's choice",
        "speculation",
        "engine/decode/host_steps.py",
        "return token, i < len(drafts) and token == drafts[i]",
        "return token, i < len(drafts)",
        "tokens are sampled after a text that is not the text of the answer",
        ("tests/speculative/test_speculation.py::test_scripts_of_right_and_wrong_drafts",),
    ),
    Fault(
        "a position off by one after a refusal",
        "speculation",
        "engine/cuda/accept.py",
        "positions[lane] = I(at + n)",
        "positions[lane] = I(at + max(n, I(1)))",
        "after the rejection of a first draft, all positions are too large by one",
        ("tests/cuda/simulated/test_accept.py::test_exact",),
    ),
    Fault(
        "no fence before the host is told",
        "speculation",
        "engine/cuda/accept.py",
        "cuda.threadfence_system()",
        "pass",
        "the host reads tokens that are not yet written; simulations do not show this, but the machine code does",
        ("tests/cuda/test_ptx.py::test_kernel -k accept-0-sm_90",),
    ),
    Fault(
        "the longest match of a lookup",
        "speculation",
        "engine/speculative/lookup.py",
        "period = n - 1 - int(ends[-1])",
        "period = n - 1 - int(ends[0])",
        "the oldest continuation is proposed instead of the latest",
        ("tests/speculative/test_lookup.py",),
    ),
    # --- stages --------------------------------------------------------------------------------------------------
    Fault(
        "keys that stay on the GPU",
        "stages",
        "engine/models/streaming.py",
        "        if self._stores:\n            self._mirror.copy_out",
        "        if not self._stores:\n            self._mirror.copy_out",
        "after a long prompt, the layers on the CPU have no keys and values of it, so the answer ignores it",
        ("tests/cuda/simulated/test_stages.py::test_prompts_with_weights_that_are_copied",),
    ),
    Fault(
        "bits that the CPU has turned",
        "stages",
        "engine/cuda/products/repack.py",
        "np.uint32(2 * part + j // 4)",
        "np.uint32(2 * part + j % 4)",
        "with formats of five bits, a long prompt of a divided model is read with wrong weights",
        ("tests/cuda/simulated/test_operations.py::test_records_of_the_cpu_become_those_of_the_gpu",),
    ),
    Fault(
        "the rows of another pass",
        "stages",
        "engine/cuda/backend.py",
        "if self._written.get(place.tokens.address) is not batch:",
        "if place.tokens.address not in self._written:",
        "a GPU computes every pass for the tokens and positions of the first one",
        ("tests/cuda/simulated/test_stages.py::test_a_divided_model_has_the_bits_of_the_cpu",),
    ),
    Fault(
        "a stage that begins with an old residual stream",
        "stages",
        "engine/models/stage.py",
        "self._inputs.place(part, None if x is None else x[rows],",
        "self._inputs.place(part, None if x is None else x[: part.rows],",
        "a device that reads a long pass in slices computes the first rows again and again",
        ("tests/models/test_stages.py::test_a_divided_model_has_the_bits_of_the_whole",),
    ),
    # --- quantized caches ----------------------------------------------------------------------------------------
    Fault(
        "a sign in the rotation, CPU",
        "quantized caches",
        "engine/cpu/quantized_cache.py",
        "x[b + i + h] = low - high",
        "x[b + i + h] = high - low",
        "the rotation is no longer its own inverse, so attention returns wrong values",
        ("tests/cpu/test_quantized_cache.py::test_rotation_against_the_matrix",),
    ),
    Fault(
        "a sign in the rotation, GPU",
        "quantized caches",
        "engine/cuda/quantized_cache.py",
        "x = other - x if lane & (1 << k) else x + other",
        "x = x - other if lane & (1 << k) else x + other",
        "the signs of keys differ between the devices",
        ("tests/cuda/simulated/test_rope.py::test_heads_of_quantized_caches",),
    ),
    # --- the threads of the CPU ------------------------------------------------------------------------------------
    Fault(
        "a stage that ends a tile too early",
        "threads",
        "engine/cpu/runtime/walk.py",
        "            if still & COUNT == 0:\n                k += 1",
        "            if still & COUNT <= 1:\n                k += 1",
        "a thread continues before the result of a slower thread is complete: wrong bits, only on busy machines",
        ("tests/cpu/test_team.py::test_a_stage_waits_for_its_slowest_tile",),
    ),
    Fault(
        "a pass that is over",
        "threads",
        "engine/cpu/runtime/walk.py",
        "        now = load(left, k)\n        if now >> 32 != order:\n            return n\n",
        "        now = load(left, k)\n",
        "a thread that is late computes tiles of another pass as if they belonged to its own",
        ("tests/cpu/test_team.py::test_a_late_thread_claims_nothing",),
    ),
    Fault(
        "operations that are not independent",
        "threads",
        "engine/cpu/operations/rows.py",
        "*given, items=y.size, ns=0.5, multiple=64)",
        "*given, items=y.size, ns=0.5, multiple=64, joined=True)",
        "if another thread is slower, a gate is computed before the products that it reads are complete",
        ("tests/cpu/test_programs.py",),
    ),
    Fault(
        "memory that is used again within a stage",
        "threads",
        "engine/cpu/runtime/pool.py",
        "        self._read.append(slab)",
        "        self._unused.setdefault(slab.size, []).append(slab)",
        "rotated keys overwrite the queries that another thread is about to rotate",
        ("tests/cpu/test_programs.py::test_queries_keys_and_values_of_one_size",),
    ),
    Fault(
        "memory of a result that is still read",
        "threads",
        "engine/cpu/runtime/pool.py",
        "        return np.asarray(Allocation(self, slab))[:wanted].view(dtype).reshape(shape)",
        "        self.give_back(slab)\n        return slab[:wanted].view(dtype).reshape(shape)",
        "a later operation of the pass overwrites a result that another operation has not read yet",
        ("tests/cpu/test_programs.py",),
    ),
    # --- tools ---------------------------------------------------------------------------------------------------
    Fault(
        "a constant that the fingerprint misses",
        "tools",
        "engine/compile/sources.py",
        "elif home in self._texts:",
        "elif home in self._texts and original.islower():",
        "kernels that were compiled with an older constant of another file are used: wrong bits without a warning",
        ("tests/compile/test_kernel_cache.py::test_a_constant_that_a_kernel_reads_changes_the_fingerprint",),
    ),
    Fault(
        "symbols that two processes share",
        "tools",
        "engine/compile/symbols.py",
        "made.unique_id = number(made.func)",
        "made.unique_id = made.unique_id",
        "if two cached kernels have the same symbol, the first one loaded is used for both: Q4_K is read as Q5_K",
        ("tests/compile/test_symbols.py::test_kernels_that_forked_processes_store",),
    ),
    Fault(
        "symbols that forget a closure",
        "tools",
        "engine/compile/symbols.py",
        "defaults, _digest(closure, inside)]",
        "defaults]",
        "the functions of all formats have the same symbol, so a kernel calls the one that was loaded first",
        ("tests/compile/test_symbols.py::test_members_of_a_family_have_numbers_of_their_own",),
    ),
    Fault(
        "a folder of kernels that others can write to",
        "tools",
        "engine/machine/trust.py",
        "if status.st_mode & _others(status.st_gid):",
        "if status.st_mode & stat.S_IWOTH:",
        "another user writes code to a folder shared by a group, and it runs with the rights of the engine's user",
        ("tests/compile/test_kernel_cache.py::test_a_folder_that_others_can_write_to_is_not_used",),
    ),
    Fault(
        "a folder of kernels that a group can replace",
        "tools",
        "engine/machine/trust.py",
        "writers = _others(status.st_gid) if parent in nearest else stat.S_IWOTH",
        "writers = stat.S_IWOTH",
        "a member of the group renames the folder and replaces it by a link to other code",
        ("tests/compile/test_kernel_cache.py::test_a_folder_that_others_can_write_to_is_not_used",),
    ),
    Fault(
        "kernels that everybody can write to",
        "tools",
        "engine/machine/trust.py",
        "os.O_EXCL, 0o600)",
        "os.O_EXCL, 0o666)",
        "with a umask of 0, other users can change code that this user runs",
        ("tests/compile/test_kernel_cache.py::test_what_is_stored_is_private",),
    ),
    Fault(
        "a function of a program that only its name identifies",
        "tools",
        "engine/compile/symbols.py",
        'if "<" in name or home.partition(".")[0] not in (PACKAGE, *LIBRARIES):',
        'if "<" in name:',
        "two programs have different functions with the same name and symbol, and one calls the other's function",
        ("tests/compile/test_symbols.py::test_what_a_program_defines_has_no_digest",),
    ),
    Fault(
        "a lock whose holder a fork left behind",
        "tools",
        "engine/locking.py",
        "            self.lose(IN_USE)",
        '            self.lose("")',
        "a process that is forked while another thread computes waits forever at its first token",
        ("tests/test_forks.py::test_a_lock_that_another_thread_has",),
    ),
    Fault(
        "kernels of a family under one name",
        "tools",
        "engine/compile/family.py",
        "            name = f\"{self.__module__}.{self.__name__}[{','.join(map(str, constants))}]\"",
        '            name = f"{self.__module__}.{self.__name__}"',
        "a kernel for another format is loaded from the cache: matrices of Q4_K are read as Q6_K",
        ("tests/compile/test_kernel_cache.py::test_members_of_a_family_are_stored_apart",),
    ),
    Fault(
        "an expression that tries every division of a number",
        "tools",
        "engine/serving/ollama/loading.py",
        "(?:[0-9]+(?:\\.[0-9]*)?|",
        "(?:[0-9]+\\.?[0-9]*|",
        "one small request blocks a server for a minute",
        ("tests/test_expressions.py",),
    ),
    Fault(
        "an expression that tries again from every digit",
        "tools",
        "engine/text/bpe.py",
        'LINEAR.get(pattern, (pattern, "isolated"))',
        '(pattern, "isolated")',
        "a text of digits occupies a thread of the server for hours",
        ("tests/text/test_pre_tokenizers.py::test_long_runs_take_time_in_proportion_to_their_length",),
    ),
    Fault(
        "memory that a request never gives back",
        "tools",
        "engine/serving/guard.py",
        "            claim.hold(0)\n",
        "            pass\n",
        "after some large requests, a server answers no further requests",
        ("tests/serving/test_attacks.py::test_many_large_requests_at_once",),
    ),
    Fault(
        "the newest idle connection is closed",
        "tools",
        "engine/serving/connections.py",
        "waiting = nsmallest(",
        "from heapq import nlargest; waiting = nlargest(",
        "a client that opens idle connections prevents all other clients from connecting",
        ("tests/serving/test_bounds.py::test_those_that_have_waited_longest_for_their_clients_are_closed",),
    ),
    Fault(
        "a traceback for a mistyped path",
        "tools",
        "engine/cli/entry.py",
        "    if verbose:\n        traceback.print_exc()",
        "    if not verbose:\n        traceback.print_exc()",
        "a user sees twenty lines of a Python traceback instead of one sentence",
        ("tests/test_run.py::test_a_mistake_is_one_sentence",),
    ),
    Fault(
        "parity that counts only some bits",
        "tools",
        "engine/verify/lockstep.py",
        "bits = np.bitwise_count(_bits(self.cpu) ^ _bits(self.gpu))",
        "bits = np.bitwise_count((_bits(self.cpu) ^ _bits(self.gpu)) >> 1)",
        "a difference in the last bit of every value is not reported",
        ("tests/verify/test_parity.py::test_a_check_counts_and_shows_bits",),
    ),
)


Result = tuple[Fault, Outcome]


def table(results: Sequence[Result]) -> str:
    """A Markdown table of the faults and the tests that found them."""
    lines = ["| room | fault | file | what it would do | found by |", "| --- | --- | --- | --- | --- |"]
    for fault, outcome in results:
        by = f"`{outcome.found}`" if outcome.noticed else "**nothing**"
        why = fault.why.replace("<", "&lt;").replace("|", "&#124;")
        lines.append(f"| {fault.room} | {fault.name} | `{fault.file}` | {why} | {by} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line.  Returns 0 if every fault is found, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description="Plant faults, one at a time, and report which tests find them."
    )
    parser.add_argument("-k", default="", help="only faults whose name, room or file contains this text")
    parser.add_argument(
        "-j", type=int, default=os.cpu_count() or 1, help="number of faults at a time (default: one per core)"
    )
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument("--markdown", type=Path, help="write a table of the results to this page")
    args = parser.parse_args(arguments)
    chosen = [fault for fault in FAULTS if args.k in f"{fault.name} {fault.room} {fault.file}"]
    if args.list or not chosen:
        print("\n".join(f"{fault.room}: {fault.name} ({fault.file})" for fault in chosen))
        return 0
    started = time.perf_counter()
    results: list[Result] = []
    with Runner[Fault](args.j) as runner:
        print("Without a fault:", flush=True)
        runner.unchanged(chosen)
        for fault, outcome in runner.run(chosen):
            results.append((fault, outcome))
            print(f"{fault.room}: {fault.name}: {outcome} ({outcome.seconds:.0f} s)", flush=True)
    results.sort(key=lambda result: chosen.index(result[0]))
    if args.markdown:
        write_table(args.markdown, "faults", table(results))
    found = sum(outcome.noticed for _, outcome in results)
    print(f"{found} of {len(results)} found in {time.perf_counter() - started:.0f} s.")
    return 0 if found == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
