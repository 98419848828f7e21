"""48 public faults of attention kernels (B01-B48) and the tests that keep each away.

An entry is a test ("file.py::function", with or without parameters, in this folder).
tests/test_faults_map.py checks that every fault has an entry and that every test named exists."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    title: str
    source: str  # where it was reported
    tests: tuple[str, ...]  # test ids here


def _in(file: str, *functions: str) -> tuple[str, ...]:
    return tuple(f"test_{file}.py::{function}" for function in functions)


FAULTS: dict[str, Fault] = {
    "B01": Fault(
        "leading keys all -inf give NaN",
        "xFormers #722",
        (
            *_in("faults_softmax", "test_b01_leading_keys_hidden"),
            *_in("faults_softmax", "test_b01_equals_the_call_on_visible_keys"),
            *_in("faults_backward", "test_b01_gradients_with_leading_keys_hidden"),
        ),
    ),
    "B02": Fault(
        "a fully masked row gives NaN and poisons the batch",
        "PyTorch #103749, #110213, #41508, #196170",
        (
            *_in("faults_softmax", "test_b02_fully_masked_rows"),
            *_in("faults_backward", "test_b02_gradients_of_fully_masked_rows"),
        ),
    ),
    "B03": Fault(
        "finfo.min as a mask becomes -inf inside",
        "PyTorch #109517, #110213",
        (
            *_in(
                "faults_backward",
                "test_b03_gradients_at_finite_sentinels",
                "test_b03_gradients_of_rows_of_one_large_bias",
            ),
            *_in(
                "faults_softmax",
                "test_b03_finite_sentinels_are_numbers",
                "test_b03_uniform_lowest_is_the_mean",
                "test_b03_large_finite_logits",
            ),
        ),
    ),
    "B04": Fault(
        "bottom-right causal with more queries than keys",
        "flash-attention #1778, ONNX Runtime #28958",
        (
            *_in("faults_softmax", "test_b04_bottom_right_with_more_queries"),
            *_in("faults_backward", "test_b04_gradients_of_bottom_right_with_more_queries"),
        ),
    ),
    "B05": Fault(
        "backward: padded key columns score 0",
        "PyTorch #196678",
        (
            "test_poison.py::test_nan_beyond_the_ends",
            *_in(
                "faults_backward",
                "test_b05_padded_keys_are_not_zero_scores",
                "test_b05_shift_of_all_logits",
            ),
            "test_poison.py::test_gradients_with_nan_beyond_the_ends",
            "test_poison.py::test_backward_between_canaries",
        ),
    ),
    "B06": Fault(
        "backward NaN at large finite logits",
        "PyTorch #119320",
        (
            *_in(
                "faults_backward",
                "test_b06_weights_stay_below_one",
                "test_b06_training_on_constant_input",
            ),
        ),
    ),
    "B07": Fault(
        "partial tile, position bias and causal",
        "PyTorch #153799",
        (
            *_in("faults_backward", "test_b07_position_bias_on_a_partial_tile"),
            *_in("faults_masks", "test_b07_position_bias_within_sequences"),
        ),
    ),
    "B08": Fault(
        "a split of the keys with no visible key",
        "flash-attention 26d7d92f, xFormers 63d7f30b",
        (
            *_in("faults_softmax", "test_b08_one_query_with_almost_nothing_visible"),
            *_in("faults_backward", "test_b08_splits_without_a_visible_key"),
            *_in("decode", "test_parts_without_keys"),
        ),
    ),
    "B09": Fault(
        "more than 32768 keys",
        "xFormers #719",
        _in(
            "faults_sizes",
            "test_b09_many_keys",
            "test_b09_many_queries",
            "test_b09_square_zeros_and_numbers",
        ),
    ),
    "B10": Fault(
        "bias stride beyond 2^31",
        "xFormers #788",
        _in("faults_sizes", "test_b10_bias_batch_stride", "test_b10_bias_stride_over_a_hole"),
    ),
    "B11": Fault(
        "bias row offset wraps at 2^32",
        "PyTorch #162588, #187227, #186075",
        _in(
            "faults_sizes",
            "test_b11_bias_row_offset",
            "test_b11_row_strides",
            "test_b11_output_offset",
            "test_b11_batch_and_head_offset",
        ),
    ),
    "B12": Fault(
        "the same in backward, in a write",
        "PyTorch #155397",
        (
            *_in(
                "faults_training",
                "test_b12_bias_gradient_offset",
                "test_b12_bias_gradient_over_many_heads",
            ),
        ),
    ),
    "B13": Fault(
        "backward workspace offsets",
        "flash-attention #1500, #2260",
        (*_in("faults_training", "test_b13_many_batches_of_tiny_sequences"),),
    ),
    "B14": Fault(
        "packed token offset times stride",
        "sglang #20389",
        (
            *_in("faults_training", "test_b14_token_offset"),
            *_in("faults_masks", "test_b14_packed_offsets_beyond_2_to_the_31"),
        ),
    ),
    "B15": Fault(
        "refused for a batch stride that is never used",
        "comfy-kitchen #178",
        _in(
            "faults_sizes",
            "test_b15_stride_of_a_size_1_dim",
            "test_b15_batch_of_one_beyond_32_bits",
        ),
    ),
    "B16": Fault(
        "batch of 65536 and more",
        "xFormers #845, #998, PyTorch #146704",
        _in("faults_sizes", "test_b16_many_batches", "test_b16_reported_sizes"),
    ),
    "B17": Fault(
        "65536 heads and more",
        "PyTorch #142228, #177985, #133976",
        _in("faults_sizes", "test_b17_many_heads", "test_b17_reported_sizes"),
    ),
    "B18": Fault(
        "fake kernel has other strides than the real one",
        "PyTorch #180445",
        (
            *_in("faults_sizes", "test_b18_fake_has_the_strides_of_the_real_op"),
            *_in("faults_training", "test_b18_compiled_gradients_of_a_large_batch"),
            "test_compile.py::test_fake_gradients_equal_real",
            *_in("training", "test_b18_dynamic_shapes"),
        ),
    ),
    "B19": Fault(
        "bias with N not a multiple of 8",
        "xFormers #683, #684, #808, #813",
        _in("faults_layout", "test_b19_b20_every_n_and_row_stride", "test_b19_reported_sizes"),
    ),
    "B20": Fault(
        "unaligned kernel loads the bias with 128-bit accesses",
        "ONNX Runtime #28369, #28365",
        _in("faults_layout", "test_b19_b20_every_n_and_row_stride"),
    ),
    "B21": Fault(
        "misaligned address with aligned strides",
        "PyTorch #183484",
        _in("faults_layout", "test_b21_storage_offsets"),
    ),
    "B22": Fault(
        "insignificant strides rewritten by a compiler",
        "PyTorch #121943, #138317, #139424, #124289, #140192",
        (
            *_in("faults_layout", "test_b22_insignificant_strides"),
            "test_memory.py::test_peak_is_the_result",
            *_in("training", "test_b48b_compiled_training"),
        ),
    ),
    "B23": Fault(
        "head dim not a multiple of 8",
        "PyTorch #90413, #110630, flash-attention #28, #1347",
        (
            *_in("faults_layout", "test_b23_every_small_head_dim"),
            *_in("faults_layout", "test_b23_stable_diffusion"),
            "test_forward.py::test_oracle",
        ),
    ),
    "B24": Fault(
        "gradient of the output with other strides",
        "flash-attention #355",
        (
            *_in(
                "faults_backward",
                "test_b24_gradient_of_any_strides",
                "test_b24_as_autograd_makes_them",
            ),
        ),
    ),
    "B25": Fault(
        "packed QKV inputs and packed gradients",
        "xFormers #449, #454, #456, #535",
        (
            *_in("faults_layout", "test_b29_layouts_at_every_head_dim"),
            *_in("faults_backward", "test_b25_packed", "test_b25_sharing_a_storage_is_not_packed"),
        ),
    ),
    "B26": Fault(
        "single query, stride-0 key and value, bias",
        "PyTorch #112577, xFormers #952, PyTorch #191937",
        (
            *_in("faults_layout", "test_b26_b27_shared_heads"),
            *_in("head_packing", "test_what_packing_touches", "test_biases_over_sequences"),
        ),
    ),
    "B27": Fault(
        "LSE wrong under the same remap",
        "xFormers 41646dbb",
        (
            *_in("faults_layout", "test_b26_b27_shared_heads"),
            *_in("faults_backward", "test_b27_shared_heads_when_rows_are_one_over_a_tile"),
            *_in("head_packing", "test_oracle", "test_bits_and_gradients"),
        ),
    ),
    "B28": Fault(
        "the same remap drops the window",
        "xFormers 1e13ad90",
        (
            *_in("faults_layout", "test_b28_one_query_keeps_its_window"),
            *_in("faults_masks", "test_b28_one_query_keeps_its_window_of_shared_heads"),
            *_in("head_packing", "test_windows", "test_sequences"),
        ),
    ),
    "B29": Fault(
        "one head dim's kernel assumes contiguous strides",
        "flash-attention #2666, #2545",
        (
            *_in("faults_layout", "test_b29_layouts_at_every_head_dim"),
            "test_variants.py::test_variant",
            "test_poison.py::test_output_strides",
        ),
    ),
    "B30": Fault(
        "sliced key and value: gradient garbage",
        "PyTorch #146377",
        (*_in("faults_backward", "test_b30_sliced_key_and_value"),),
    ),
    "B31": Fault(
        "query, key, value of different contiguity",
        "flash-attention #818, PyTorch #119500",
        (
            *_in("faults_layout", "test_b29_layouts_at_every_head_dim"),
            *_in("faults_backward", "test_b31_each_of_another_contiguity"),
        ),
    ),
    "B32": Fault(
        "gradient of a broadcast bias",
        "xFormers #636, #783, #854",
        (
            *_in(
                "faults_dropout",
                "test_b32_every_way_to_write_a_bias",
                "test_b32_evoformer_and_swin",
            ),
            *_in("faults_dropout", "test_b32_reported_sizes"),
            "test_backward.py::test_oracle",
        ),
    ),
    "B33": Fault(
        "backward wrong with dropout",
        "xFormers #724",
        (
            *_in(
                "faults_dropout",
                "test_b33_philox_of_the_paper",
                "test_b33_the_mask_is_the_stated_function",
            ),
            *_in(
                "faults_dropout",
                "test_b33_forward_and_backward_drop_the_same",
                "test_b33_reported_sizes",
            ),
            *_in("faults_dropout", "test_b33_p_of_one_and_of_nothing", "test_b33_statistics"),
            "test_variants.py::test_variant_drops_the_same",
        ),
    ),
    "B34": Fault(
        "dropout and CUDA graphs",
        "flash-attention #165, #379",
        (
            *_in(
                "faults_training",
                "test_b34_graphs_replay_new_masks",
                "test_b34_graph_equals_the_call",
            ),
        ),
    ),
    "B35": Fault(
        "RNG state read without ordering",
        "PyTorch #197563",
        (*_in("faults_training", "test_b35_dropout_under_load"),),
    ),
    "B36": Fault(
        "run-to-run differences",
        "xFormers #624, #764, #1128",
        (
            "test_forward.py::test_repeats_are_bit_equal",
            *_in("faults_framework", "test_b36_forward_under_load"),
            *_in("faults_training", "test_b36_gradients_repeat", "test_b36_metamorphic_rows"),
        ),
    ),
    "B37": Fault(
        "shared-memory races",
        "xFormers 55a4798d, 5498468a, #381, #1039",
        (
            "test_variants.py::test_variant_repeats_are_bit_equal",
            *_in("faults_framework", "test_b37_reported_shapes"),
            *_in("faults_training", "test_b37_gradients_on_the_reported_shapes"),
        ),
    ),
    "B38": Fault(
        "backward race that ptxas -O2 exposes",
        "flash-attention #359",
        (
            *_in("faults_training", "test_b38_reported_size_fifty_times"),
            "test_variants.py::test_variant_repeats_are_bit_equal",
        ),
    ),
    "B39": Fault(
        "zero-size tensors",
        "xFormers #852, PyTorch #133780",
        (
            *_in("faults_sizes", "test_b39_empty", "test_b39_empty_with_a_diagonal"),
            *_in("faults_sizes", "test_b39_reported_size_launches_nothing"),
            *_in("faults_training", "test_b39_gradients_of_empty_tensors"),
        ),
    ),
    "B40": Fault(
        "zero-length segments",
        "flash-attention #2562, #2421",
        _in("faults_masks", "test_b40_zero_length_segments"),
    ),
    "B41": Fault(
        "tiles beyond the last segment",
        "flash-attention #2763",
        (
            "test_poison.py::test_backward_between_canaries",
            *_in("faults_masks", "test_b41_lengths_that_do_not_fill_tiles"),
            *_in("mask_kernels", "test_rows_behind_the_last_sequence"),
            *_in("sequence_order", "test_every_row_has_one_tile", "test_many_sequences"),
        ),
    ),
    "B42": Fault(
        "bounds mask skipped because no causal mask is needed",
        "flash-attention c65b5106",
        (
            "test_forward.py::test_oracle",
            *_in("faults_masks", "test_b42_many_queries_few_keys_in_a_sequence"),
            *_in("faults_backward", "test_b42_many_queries_few_keys"),
        ),
    ),
    "B43": Fault(
        "keys nobody attends to",
        "xFormers #456",
        (
            *_in("faults_backward", "test_b43_keys_nobody_attends_to"),
            "test_poison.py::test_backward_between_canaries",
        ),
    ),
    "B44": Fault(
        "which corner causal is anchored to",
        "flash-attention #282, #380, #402, #517",
        (
            *_in("faults_softmax", "test_b44_corners", "test_b44_diagonal_with_a_bias"),
            *_in("faults_masks", "test_b44_a_mask_that_moves_stays_causal"),
        ),
    ),
    "B45": Fault(
        "shared memory limit guessed from the compute capability",
        "xFormers #517, #563, PyTorch #100326",
        (
            *_in("faults_dispatch", "test_b45_b47_every_gpu_runs_everything"),
            *_in("faults_dispatch", "test_b45_shared_memory_is_the_queried_limit"),
            *_in("faults_training", "test_b45_backward_fits_every_gpu", "test_b45_reported_shapes"),
        ),
    ),
    "B46": Fault(
        "no kernel found: bf16 before sm80, arch not in the build",
        "xFormers #729, vLLM #199, DeepSeek-VL2 #119",
        _in(
            "faults_dispatch",
            "test_b46_bf16_before_sm80",
            "test_b46_reported_size",
            "test_b46_missing_arch_is_named",
            "test_b46_reasons_name_limit_and_value",
            "test_b46_info_names_what_is_there",
        ),
    ),
    "B47": Fault(
        "GPU newer than the build",
        "xFormers #1323, #1251",
        (
            *_in("faults_dispatch", "test_b45_b47_every_gpu_runs_everything"),
            *_in("faults_dispatch", "test_b47_newer_than_the_build"),
            *_in("faults_dispatch", "test_b47_explain_for_another_gpu", "test_b47_v100_size"),
            *_in(
                "faults_training",
                "test_b47_v100_shape",
                "test_b47_explain_names_the_backward_kernel_of_a_newer_gpu",
            ),
        ),
    ),
    "B48": Fault(
        "the framework contract, a-q",
        "a cluster: see the test names for the letters",
        (
            *_in("faults_framework", "test_b48a_autocast", "test_b48a_no_autocast_no_quiet_cast"),
            *_in("faults_framework", "test_b48b_compile_without_a_break"),
            *_in("faults_framework", "test_b48d_any_stride_order", "test_b48e_lse_is_not_padded"),
            *_in("faults_framework", "test_b48f_vmap", "test_b48h_side_stream"),
            *_in("faults_framework", "test_b48h_no_host_sync", "test_b48i_second_gpu"),
            *_in("faults_framework", "test_b48i_mixed_devices_are_refused"),
            *_in("faults_framework", "test_b48j_graph_capture_and_replay"),
            *_in("faults_framework", "test_b48k_not_tagged_random"),
            *_in("faults_framework", "test_b48m_other_key_count_in_value"),
            "test_memory.py::test_peak_is_the_result",  # n
            *_in("faults_framework", "test_b48q_grouped_five_dims_with_bias"),
            *_in("training", "test_b48a_autocast_training", "test_b48b_compiled_training"),
            *_in("training", "test_b48d_inductor_training", "test_b48f_vmap_of_gradients"),
            *_in("training", "test_b48g_double_backward_is_an_error", "test_b48k_checkpoint"),
            *_in(
                "training", "test_b48k_selective_checkpoint", "test_b48l_every_subset_requires_grad"
            ),
            *_in("training", "test_b48l_no_gradient_no_graph", "test_b48m_gradients_that_disagree"),
            *_in(
                "training_devices", "test_b48b_two_processes", "test_b48h_backward_on_a_side_stream"
            ),
            *_in("training_devices", "test_b48h_training_without_a_host_sync"),
            *_in("training_devices", "test_b48i_gradients_on_the_second_gpu"),
            *_in("faults_training", "test_b48n_reported_peak"),
            "test_memory.py::test_backward_peak_is_gradients_and_workspace",  # n
            *_in("mask_kernels", "test_a_graph_with_other_lengths"),  # j (packed)
            *_in("mask_kernels", "test_nothing_waits_for_the_device"),
            *_in("mask_kernels", "test_biases_over_sequences"),  # p
            *_in("build", "test_spills_and_c75_warnings_are_faults_unless_allowed"),  # o
            *_in("bench", "test_compare"),
        ),
    ),
}
