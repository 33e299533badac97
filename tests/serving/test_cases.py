"""Every case of the log of other engines' bugs (D.1 prefix caching, D.2 kernels and batching, D.3 speculation).

A case is a test, named by its file and function, or a reason why it cannot be one here. Programs that run without a GPU
take the portable kernels; the Mosaic kernels pass the same cases in `tests/pallas`.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

ENGINE, CORE, SPEC, TIER = (
    "serving/test_engine.py",
    "serving/test_core.py",
    "serving/test_speculation.py",
    "serving/test_tiering.py",
)
FIELDS, MORE, MESH, MODEL = (
    "serving/test_request_fields.py",
    "serving/test_more_cases.py",
    "serving/test_mesh.py",
    "k3jax/test_model.py",
)
GRAMMARS = "serving/constraints/test_drafts_under_grammars.py"
PREFILL, DECODE, DRAFTS, STEP = (
    "pallas/kda/test_prefill.py",
    "pallas/kda/test_decode.py",
    "k3jax/test_dspark.py",
    "k3jax/test_speculate.py",
)

CASES = {
    "1": (ENGINE, "test_repeat_hits_and_says_the_same"),
    "2": (ENGINE, "test_a_damaged_state_fails_its_reader_alone"),
    "3": "KDA has as many key as value channels per head, in the released model and in this code",
    "4": (MORE, "test_chunk_sizes_say_the_same"),
    "5": "no cause is known; what would be written out of bounds is checked by D.2 36 and by the books",
    "6": (CORE, "test_repeats_of_every_length_get_the_longest_legal_hit"),
    "7": (TIER, "test_the_longer_of_two_prefixes_wins"),
    "8": (SPEC, "test_repeat_and_next_turn_hit"),
    "9": (CORE, "test_a_prompt_that_ends_anywhere_past_a_boundary_can_be_continued"),
    "10": (SPEC, "test_repeat_and_next_turn_hit"),
    "11": (ENGINE, "test_fresh_memory_is_never_read"),
    "12": (ENGINE, "test_states_inside_a_chunk"),
    "13": (MORE, "test_pools_of_more_than_2_to_31_elements"),
    "14": (ENGINE, "test_junction_is_reused_by_the_third"),
    "15": (MORE, "test_any_unit_works_with_any_page"),
    "16": (MESH, "test_tokens_hits_and_preemption_are_those_of_one_device"),
    "17": (ENGINE, "test_states_inside_a_chunk"),
    "18": ("serving/test_launch.py", "test_the_plan_is_what_is_allocated"),
    "19": (ENGINE, "test_repeat_hits_and_says_the_same"),
    "20": (ENGINE, "test_tenants_never_meet"),
    "21": (ENGINE, "test_repeat_hits_and_says_the_same"),
    "22": (CORE, "test_repeats_of_every_length_get_the_longest_legal_hit"),
    "23": ("serving/test_schedules.py", "test_cancellations_leave_nothing_behind"),
    "24": (TIER, "test_a_prefix_that_does_not_fit_is_not_half_restored"),
    "25": (TIER, "test_a_damaged_file_counts_as_absent"),
    "26": (TIER, "test_the_real_model_after_a_round_trip"),
    "27": (ENGINE, "test_a_b_a"),
    "28": ("serving/test_retention.py", "test_interval_must_fit_the_unit"),
    "29": (ENGINE, "test_planned_bytes_are_those_allocated"),
    "29b": (CORE, "test_repeats_of_every_length_get_the_longest_legal_hit"),
    "29c": (MORE, "test_any_unit_works_with_any_page"),
    "30": (ENGINE, "test_decode_beside_prefill"),
    "31": (ENGINE, "test_lengths_around_the_chunk"),
    "32": (MORE, "test_pools_of_more_than_2_to_31_elements"),
    "33": (MORE, "test_pools_of_more_than_2_to_31_elements"),
    "34": (ENGINE, "test_batch_of_different_requests"),
    "35": (ENGINE, "test_order_of_the_rows_does_not_matter"),
    "36": (ENGINE, "test_padding_writes_nothing"),
    "37": (PREFILL, "test_boundaries"),
    "38": (PREFILL, "test_all_lengths_in_one_call"),
    "39": (MORE, "test_slots_and_pages_are_arguments"),
    "40": (MORE, "test_the_router_chooses_in_float32"),
    "41": "no preset spreads one sequence over devices; its parts are in `tests/pallas/kda/test_affine.py`",
    "42": "the engine packs no documents into one sequence: each row has a slot of its own (D.1 20)",
    "43": (MORE, "test_attention_knows_no_positions"),
    "44": (MORE, "test_experts_work_on_the_latent_width"),
    "45": ("k3jax/test_config.py", "test_every_problem_is_named_at_once"),
    "46": (ENGINE, "test_a_damaged_state_fails_its_reader_alone"),
    "46b": (MORE, "test_a_compiled_step_is_the_step"),
    "46c": (MORE, "test_chunk_sizes_say_the_same"),
    "47": (SPEC, "test_rows_of_a_batch_accept_different_numbers"),
    "48": (SPEC, "test_rows_of_a_batch_accept_different_numbers"),
    "49": (SPEC, "test_rows_of_a_batch_accept_different_numbers"),
    "50": (MESH, "test_drafts_on_a_mesh"),
    "51": "contexts of 200,000 tokens need a GPU",
    "52": (STEP, "test_commit_equals_that_many_decode_steps"),
    "53": (DRAFTS, "test_qwen_manifest_with_its_own_embedding_and_head"),
    "54": (MORE, "test_a_block_of_drafts_is_one_token_wider"),
    "55": (MORE, "test_draft_rows_are_planned_in_their_own_size"),
    "56": (GRAMMARS, "test_greedy_tokens_are_those_without_drafts"),
    "57": (MORE, "test_padding_beside_drafts_writes_nothing"),
    "57b": (FIELDS, "test_constrained_and_free_rows_share_a_batch"),
    "57c": (DECODE, "test_commit_is_bit_identical_to_decode"),
    "57d": (DRAFTS, "test_golden_drafts"),
}


def functions(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_case_has_its_test_or_reason():
    for case, entry in CASES.items():
        if isinstance(entry, str):
            assert len(entry) > 20, case
        else:
            assert entry[1] in functions(ROOT / entry[0]), f"case {case}: {entry[0]} has no {entry[1]}"


def test_no_case_is_missing(shared):
    text = (shared / "spec" / "serving.md").read_text()
    section = text[text.index("### D.1 ") : text.index("### D.4 ")]
    assert set(re.findall(r"^\| (\d+[a-z]?) \|", section, re.MULTILINE)) == CASES.keys()
