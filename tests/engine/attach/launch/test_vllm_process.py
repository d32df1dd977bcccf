"""What vLLM is started with."""

from __future__ import annotations

from penstock.engine.attach.launch.vllm_process import FEW_CPUS, environment

VARIABLE = "VLLM_ENABLE_V1_MULTIPROCESSING"


def test_environment_has_defaults_for_what_is_not_set() -> None:
    assert environment({}, 64)["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment({"OMP_WAIT_POLICY": "ACTIVE", "HOME": "/x"}, 64)["OMP_WAIT_POLICY"] == "ACTIVE"
    assert environment({"HOME": "/x"}, 64)["HOME"] == "/x"


def test_model_on_few_cpus_runs_in_the_process_of_its_engine() -> None:
    assert environment({}, FEW_CPUS)[VARIABLE] == "0"
    assert VARIABLE not in environment({}, FEW_CPUS + 1)
    assert environment({VARIABLE: "1"}, FEW_CPUS)[VARIABLE] == "1"


def test_threads_that_the_operator_binds_have_a_process() -> None:
    assert VARIABLE not in environment({"VLLM_CPU_OMP_THREADS_BIND": "0"}, FEW_CPUS)
    assert VARIABLE not in environment({"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}, FEW_CPUS)
