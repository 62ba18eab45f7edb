"""What AWS refuses: the public kinds of errors, in AWS's words."""

from __future__ import annotations

import pickle

import pytest

from skyward import errors
from skyward.providers.aws.api import refusal

CODES = {
    "UnauthorizedOperation": ("PermissionDenied", "aws-policy.json"),
    "OptInRequired": ("PermissionDenied", "AWS console"),
    "AuthFailure": ("CredentialsMissing", "aws configure"),
    "ExpiredToken": ("CredentialsExpired", "aws sso login"),
    "VcpuLimitExceeded": ("QuotaExceeded", "Service Quotas"),
    "InsufficientInstanceCapacity": ("CloudRefused", "another zone"),
    "InternalError": ("CloudRefused", "status page"),
    "InvalidParameterValue": ("CloudRefused", "sky.AWS(...)"),
}


@pytest.mark.parametrize("code", CODES)
def test_a_code_becomes_a_public_kind_of_error_that_says_what_to_do_on_aws(code: str) -> None:
    name, words = CODES[code]
    error = refusal("ec2:RunInstances", code, "no", "us-east-1")
    assert isinstance(error, getattr(errors, name))
    assert type(error).__name__ == name
    assert words in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
