"""Which test stands for each case of Transformers' own suites of quantizers, and where this package differs on purpose.

The cases are those of the folders `tests/quantization/` of Transformers: `bnb`, `torchao_integration`,
`quanto_integration`, `hqq` and `finegrained_fp8`. Cases that only run on several GPUs, or that test a helper of that
library alone, are listed with the reason why there is no such test here.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ARCHITECTURES = "models/test_architectures.py"
CONFIG = "models/choosing/test_config.py"
ARGUMENTS = f"{CONFIG}::test_an_argument_that_does_not_exist_is_refused_with_the_right_one"
LOADING = "models/test_quantizer.py"
SAVING = "models/saving/test_saving.py"
SELECTION = "models/choosing/test_selection.py"
TRAINING = "models/test_training.py"
HERE = "peers/test_transformers.py"

SEVERAL_GPUS = "No machine with two GPUs runs these tests; device maps are tested with the CPU and the meta device."
HELPER = "It tests a function that replaces layers. This package replaces weights and has no such function."

# What this package does otherwise, on purpose.
CASTS = "A quantized model may be moved and cast: `to` changes the dtype shown, and half and float are refused."

STANDS_FOR: dict[str, dict[str, str]] = {
    "bnb/test_4bit.py": {
        "test_quantization_num_parameters": f"{HERE}::test_the_number_of_parameters_stays_as_it_was",
        "test_quantization_config_json_serialization": f"{HERE}::test_the_configuration_of_a_quantized_model_is_json",
        "test_memory_footprint": f"{LOADING}::test_memory_footprint_and_print_tell_the_truth",
        "test_original_dtype": f"{HERE}::test_dequantizing_restores_the_original_dtype_after_a_cast",
        "test_linear_are_4bit": f"{ARCHITECTURES}::test_defaults_quantize_exactly_the_expected_weights",
        "test_rwkv_4bit": f"{ARCHITECTURES}::test_quantized_model_generates_as_many_tokens_as_the_float_model",
        "test_generate_quality": f"{ARCHITECTURES}::test_quantized_outputs_are_close_to_float",
        "test_generate_quality_config": f"{LOADING}::test_a_plain_dict_is_a_configuration",
        "test_generate_quality_dequantize": f"{ARCHITECTURES}::test_dequantized_model_computes_the_same",
        "test_device_and_dtype_assignment": (
            f"{LOADING}::test_half_and_float_are_refused_and_to_changes_the_dtype_shown"
        ),
        "test_fp32_4bit_conversion": f"{ARCHITECTURES}::test_t5_keeps_wo_in_float",
        "test_bnb_4bit_wrong_config": f"{CONFIG}::test_bad_values_are_refused_and_the_allowed_listed",
        "test_inference_without_keep_in_fp32": (
            f"{HERE}::test_dequantizing_leaves_weights_that_a_model_keeps_in_float32"
        ),
        "test_inference_with_keep_in_fp32": f"{ARCHITECTURES}::test_t5_keeps_wo_in_float",
        "test_correct_head_class": f"{HERE}::test_the_head_of_each_task_stays_a_float_parameter",
        "test_pipeline": f"{LOADING}::test_generation_through_a_pipeline_is_generation",
        "test_training": f"{TRAINING}::test_lora_trains_saves_and_resumes_in_trainer",
        "test_serialization": f"{ARCHITECTURES}::test_roundtrip_is_bit_exact_and_saves_repeat",
        "test_nf4_single_unsafe": f"{ARCHITECTURES}::test_roundtrip_is_bit_exact_and_saves_repeat",
        "test_load_in_4_and_8_bit_fails": ARGUMENTS,
        "test_set_load_in_8_bit": f"{CONFIG}::test_a_float_model_is_not_quantized_by_unknown_keys",
    },
    "bnb/test_mixed_int8.py": {
        "test_get_keys_to_not_convert": f"{SELECTION}::test_a_transformers_model_is_chosen_from_on_meta",
        "test_linear_are_8bit": f"{ARCHITECTURES}::test_defaults_quantize_exactly_the_expected_weights",
        "test_llm_skip": f"{HERE}::test_a_module_that_is_skipped_takes_all_below_it_along",
        "test_warns_save_pretrained": f"{ARCHITECTURES}::test_roundtrip_is_bit_exact_and_saves_repeat",
        "test_raise_if_config_and_load_in_8bit": ARGUMENTS,
        "test_fp32_int8_conversion": f"{ARCHITECTURES}::test_t5_keeps_wo_in_float",
        "test_int8_serialization": f"{ARCHITECTURES}::test_roundtrip_is_bit_exact_and_saves_repeat",
        "test_int8_serialization_sharded": f"{SAVING}::test_max_shard_size_is_kept",
        "test_int8_from_pretrained": "hub/test_push.py::test_what_is_pushed_comes_back",
        "test_inference_with_keep_in_fp32_serialized": f"{ARCHITECTURES}::test_t5_keeps_wo_in_float",
        "test_cpu_gpu_loading_random_device_map": f"{LOADING}::test_every_device_map_gives_the_same_model",
        "test_cpu_gpu_loading_custom_device_map": f"{LOADING}::test_every_device_map_gives_the_same_model",
        "test_cpu_gpu_disk_loading_custom_device_map": (
            f"{LOADING}::test_offloaded_weights_compute_and_are_saved_as_if_they_were_not"
        ),
        "test_training": f"{TRAINING}::test_lora_trains_saves_and_resumes_in_trainer",
    },
    "torchao_integration/test_torchao.py": {
        "test_to_dict": f"{CONFIG}::test_the_dict_holds_json_values_only",
        "test_post_init_check": ARGUMENTS,
        "test_repr": f"{CONFIG}::test_repr_names_the_format",
        "test_json_serialization": f"{CONFIG}::test_json_round_trips",
        "test_int4wo_quant": f"{ARCHITECTURES}::test_quantized_outputs_are_close_to_float",
        "test_int4wo_quant_bfloat16_conversion": f"{ARCHITECTURES}::test_roundtrip_is_bit_exact_in_bfloat16",
        "test_int8_dynamic_activation_int8_weight_quant": f"{LOADING}::test_rounded_activations_survive_saving",
        "test_include_input_output_embeddings": f"{ARCHITECTURES}::test_separate_embeddings_stay_separate",
        "test_per_module_config_skip": f"{HERE}::test_each_layer_may_have_settings_of_its_own",
        "test_fqn_to_config_regex_precedence": f"{CONFIG}::test_the_more_exact_selector_wins_then_the_first_expression",
        "test_compute_module_sizes": (
            f"{LOADING}::test_the_size_that_device_maps_are_made_from_is_the_size_that_is_held"
        ),
        "test_int4wo_offload": f"{LOADING}::test_offloaded_weights_compute_and_are_saved_as_if_they_were_not",
        "test_original_model_expected_output": f"{ARCHITECTURES}::test_quantized_outputs_are_close_to_float",
        "test_serialization_expected_output": f"{ARCHITECTURES}::test_roundtrip_is_bit_exact_and_saves_repeat",
    },
    "quanto_integration/test_quanto.py": {
        "test_conversion_with_modules_to_not_convert": f"{SELECTION}::test_rules",
        "test_generate_quality_cpu": f"{ARCHITECTURES}::test_quantized_outputs_are_close_to_float",
        "test_generate_quality_cuda": "kernels/test_on_gpu.py::test_a_model_generates_what_its_dequantized_copy_does",
        "test_quantized_model_layers": f"{ARCHITECTURES}::test_defaults_quantize_exactly_the_expected_weights",
        "test_serialization_bin": f"{ARCHITECTURES}::test_roundtrip_is_bit_exact_and_saves_repeat",
        "test_serialization_safetensors": f"{ARCHITECTURES}::test_roundtrip_is_bit_exact_and_saves_repeat",
        "test_compare_with_quanto": f"{ARCHITECTURES}::test_quantizing_in_place_gives_the_same_model",
        "test_check_offload_quantized": f"{LOADING}::test_a_float_checkpoint_is_not_quantized_onto_the_disk",
        "test_load_from_quanto_saved": "imports/test_golden.py::test_weights_are_those_that_the_peer_dequantizes",
    },
    "hqq/test_hqq.py": {
        "test_to_dict": f"{CONFIG}::test_the_dict_holds_json_values_only",
        "test_fp16_quantized_model": f"{ARCHITECTURES}::test_forward_gives_finite_outputs",
        "test_model_serialization": f"{ARCHITECTURES}::test_roundtrip_is_bit_exact_and_saves_repeat",
        "test_model_serialization_dynamic_quant_with_skip": f"{HERE}::test_each_layer_may_have_settings_of_its_own",
    },
    "finegrained_fp8/test_fp8.py": {
        "test_to_dict": f"{CONFIG}::test_the_dict_holds_json_values_only",
        "test_from_dict": f"{CONFIG}::test_json_round_trips",
        "test_quantized_model_conversion": f"{SELECTION}::test_a_transformers_model_is_chosen_from_on_meta",
        "test_quantized_model": f"{ARCHITECTURES}::test_quantized_outputs_are_close_to_float",
        "test_save_pretrained": f"{ARCHITECTURES}::test_roundtrip_is_bit_exact_and_saves_repeat",
        "test_block_size": f"{HERE}::test_float8_in_blocks_of_rows_is_refused",
        "test_quantized_model_offload": f"{LOADING}::test_a_float_checkpoint_is_not_quantized_onto_the_disk",
        "test_save_pretrained_offload": f"{LOADING}::test_offloaded_weights_compute_and_are_saved_as_if_they_were_not",
        "test_linear_preserves_shape": "tensor/test_ops.py::test_products_equal_those_of_the_dense_weight",
    },
}

NOT_HERE: dict[str, dict[str, str]] = {
    "bnb/test_4bit.py": {"test_multi_gpu_loading": SEVERAL_GPUS},
    "bnb/test_mixed_int8.py": {"test_multi_gpu_loading": SEVERAL_GPUS, "test_device_and_dtype_assignment": CASTS},
    "bnb/test_replace_linear.py": {"test_replace_with_bnb_linear": HELPER},
    "torchao_integration/test_torchao.py": {"test_int4wo_quant_multi_gpu": SEVERAL_GPUS},
    "quanto_integration/test_quanto.py": {
        "test_weight_only_quantization_conversion": HELPER,
        "test_weight_and_activation_quantization_conversion": "LayerNorms stay in float: they hold few weights.",
    },
    "hqq/test_hqq.py": {"test_fp16_quantized_model_multipgpu": SEVERAL_GPUS},
    "finegrained_fp8/test_fp8.py": {
        "test_weight_and_weight_scale_inv": "It tests the tensors' names in that library's files.",
        "test_quantized_model_multi_gpu": SEVERAL_GPUS,
        "test_save_pretrained_multi_gpu": SEVERAL_GPUS,
    },
}


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
@pytest.mark.parametrize("suite", STANDS_FOR)
def test_each_case_of_a_peer_has_a_test_here(suite: str) -> None:
    for case, place in STANDS_FOR[suite].items():
        path, _, name = place.partition("::")
        assert (ROOT / path).is_file(), f"{case}: {place}"
        assert name in names_in(ROOT / path), f"{case}: {place}"


def test_no_case_is_both_tested_and_left_out() -> None:
    for suite, cases in NOT_HERE.items():
        assert not cases.keys() & STANDS_FOR.get(suite, {}).keys()
