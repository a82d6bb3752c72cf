"""One S3 server for the whole session, a bucket for each test, and the environment that leads to them."""

import itertools
from collections.abc import Iterator

import pytest
from botocore import retryhandler
from tests.stores.s3_server import REGION, S3Server

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def s3_session() -> Iterator[S3Server]:
    server = S3Server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "2",  # a request that always fails is given up soon
        }.items():
            patch.setenv(name, value)
        # Its clients wait for up to a second before they repeat a request.
        patch.setattr(retryhandler, "delay_exponential", lambda **_: 0.0)
        yield server
    server.close()


@pytest.fixture
def s3(s3_session: S3Server) -> S3Server:
    s3_session.requests.clear()
    return s3_session


@pytest.fixture
def bucket(s3: S3Server) -> str:
    """A new, empty bucket."""
    name = f"bucket-{next(_NUMBERS)}"
    s3.client.create_bucket(Bucket=name)
    return name
