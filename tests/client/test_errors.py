"""Codes, results and exceptions stay in step with the ABI and with each other."""

import pickle

import pytest

from railrelay.client import errors
from railrelay.client.errors import (
    RESULT_TEXT,
    ArgumentError,
    Busy,
    DaemonGone,
    ErrorCode,
    PeerError,
    RelayError,
    Result,
    TransferError,
    Unsettled,
    WaitTimeout,
    error,
)
from railrelay.shm_layout import abi


def test_results_are_those_of_the_abi() -> None:
    assert {result.name: result.value for result in Result} == abi.RESULTS


def test_every_result_has_a_text_and_every_failure_a_code() -> None:
    assert set(RESULT_TEXT) == set(Result)
    assert all(result.name in ErrorCode.__members__ for result in Result if result != Result.OK)


def test_a_result_of_a_newer_daemon_is_a_protocol_error() -> None:
    assert Result(max(Result) + 1) is Result.PROTOCOL


def test_codes_have_numbers_that_lead_back_to_them() -> None:
    assert [ErrorCode.of(code.number) for code in ErrorCode] == list(ErrorCode)
    assert ErrorCode.of(len(ErrorCode)) is ErrorCode.INTERNAL
    assert (ErrorCode.INTERNAL.number, ErrorCode.CANCELLED.number, ErrorCode.RAIL_DOWN.number) == (0, 1, 13)


@pytest.mark.parametrize(
    ("code", "kind"),
    [("busy", Busy), ("daemon_gone", DaemonGone), ("peer_lost", PeerError), ("overlap", ArgumentError)],
)
def test_a_code_chooses_its_exception(code: str, kind: type[RelayError]) -> None:
    raised = error(code, "lane 3<-5")
    assert type(raised) is kind
    assert raised.code == code


def test_an_unknown_code_keeps_its_name_in_the_text() -> None:
    raised = error("too_warm", "rail 3")
    assert raised.code is ErrorCode.INTERNAL
    assert str(raised) == "too_warm: rail 3"


def test_texts_end_with_the_next_step() -> None:
    assert str(error("no_daemon", "no daemon listens at /x")).endswith("; start railrelayd, or name its socket")


def test_bad_arguments_and_waits_are_also_the_builtin_errors() -> None:
    assert isinstance(error("bad_length", ""), ValueError)
    assert isinstance(error("wait_timeout", ""), TimeoutError)


@pytest.mark.parametrize(
    "raised",
    [
        error("busy", "region 3"),
        WaitTimeout(ErrorCode.WAIT_TIMEOUT, "transfer 1"),
        TransferError(Result.ABORTED, 4096, "transfer 2"),
        Unsettled(Result.UNSETTLED, 0, "transfer 3"),
    ],
)
def test_exceptions_travel_between_processes(raised: RelayError) -> None:
    copy = pickle.loads(pickle.dumps(raised))
    assert type(copy) is type(raised)
    assert (str(copy), vars(copy)) == (str(raised), vars(raised))


def test_every_exception_says_what_to_do_in_its_docstring() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RelayError)]
    assert len(kinds) > 8
    assert all(kind.__doc__ for kind in kinds)
