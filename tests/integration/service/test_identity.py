"""Tokens: shown once, stored as a hash, gone at once when revoked. Users and teams are an admin's to make."""

from __future__ import annotations

from typing import Any

import pytest

from service.auth.principals import PrincipalCache
from service.auth.tokens import hash_token
from service.db.tables import METADATA
from tests.integration.service.api_server import Api


def new_token(api: Api, who: str = "ann", **members: Any) -> dict[str, Any]:
    """A token made over REST."""
    answer = api.request("POST", "/tokens", who, json=members)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_token_is_shown_once_and_stored_only_as_a_hash(api: Api) -> None:
    node = api.node()
    part = api.start(api.submit(), node)[0]
    made = new_token(api, label="laptop")
    enrolment = new_token(api, "root", kind="enrolment")
    secrets = [made["token"], enrolment["token"], node.credential, part.token, *api.tokens.values()]

    stored = str(api.snapshot())

    assert not [secret for secret in secrets if secret in stored]
    assert hash_token(made["token"]) in stored
    assert "token" not in api.get("/tokens")["items"][-1]
    assert set(METADATA.tables["tokens"].columns.keys()) >= {"hash", "revoked_at", "expires_at"}


def test_a_revoked_token_is_refused_at_once(api: Api) -> None:
    made = new_token(api)
    assert api.request("GET", "/me", made["token"]).status_code == 200

    assert api.request("DELETE", f"/tokens/{made['id']}").status_code == 200

    assert api.request("GET", "/me", made["token"]).status_code == 401


def test_a_token_read_before_its_revocation_is_not_kept_after_it(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The revocation falls between the reading of the token and its keeping."""
    made = new_token(api)
    cache = PrincipalCache(api.database)
    now = api.database.now

    def revoked_meanwhile(connection: Any) -> float:
        cache.forget()
        return now(connection)

    monkeypatch.setattr(api.database, "now", revoked_meanwhile)
    assert cache.load(made["token"]) is not None
    assert cache.known(made["token"]) is None


def test_a_token_expires(api: Api) -> None:
    made = new_token(api, expires_in_seconds=0.001)
    api.state.principals.forget()
    assert made["expires_at"] is not None
    assert api.request("GET", "/me", made["token"]).status_code == 401


@pytest.mark.parametrize("seconds", ["0", "-1", "1e18", "1e400", "NaN", "Infinity", '"1"', "true"])
def test_a_life_that_is_none_is_refused(api: Api, seconds: str) -> None:
    before = api.snapshot()
    answer = api.request("POST", "/tokens", content=f'{{"expires_in_seconds": {seconds}}}')
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert api.snapshot() == before


def test_all_tokens_of_a_disabled_user_are_refused_at_once(api: Api) -> None:
    assert api.request("POST", "/users/bob/disable", "root").status_code == 200
    assert api.request("GET", "/me", "bob").status_code == 401


def test_a_user_handles_only_tokens_of_its_own(api: Api) -> None:
    bobs = new_token(api, "bob")
    before = api.snapshot()

    assert {token["user"] for token in api.get("/tokens")["items"]} == {"ann"}
    assert {token["user"] for token in api.get("/tokens", "root")["items"]} >= {"ann", "bob"}
    assert api.request("DELETE", f"/tokens/{bobs['id']}").status_code == 404
    assert api.request("POST", "/tokens", json={"user": "bob"}).status_code == 403
    assert api.request("POST", "/tokens", json={"kind": "enrolment"}).status_code == 403
    assert api.snapshot() == before
    assert new_token(api, "root", user="bob")["user"] == "bob"


def test_a_new_membership_counts_at_once(api: Api) -> None:
    job_id = api.submit(private=True)
    assert api.request("GET", f"/jobs/{job_id}", "bob").status_code == 404

    assert api.request("PUT", "/teams/red/members/bob", "root").status_code == 200
    assert api.request("GET", f"/jobs/{job_id}", "bob").status_code == 200
    assert api.request("DELETE", "/teams/red/members/bob", "root").status_code == 200
    assert api.request("GET", f"/jobs/{job_id}", "bob").status_code == 404


def test_a_new_user_gets_in_with_a_token_and_is_in_no_team(api: Api) -> None:
    assert api.request("POST", "/users", "root", json={"name": "eve"}).status_code == 201
    token = new_token(api, "root", user="eve")["token"]

    assert api.get("/me", token) == {"name": "eve", "admin": False, "teams": [], "server_version": api.state.version}
    answer = api.request("POST", "/jobs", token, json={"name": "x", "run": {"command": "true"}})
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert "gang admin team add" in answer.json()["fix"]


@pytest.mark.parametrize("name", ["", "-x", ".", "..", "a b", "a/b", "ä", "a" * 65, "a\nb", "a\0b", "'; --", 7, None])
@pytest.mark.parametrize("path", ["/users", "/teams"])
def test_o38_a_name_of_a_user_or_team_that_would_need_escaping_is_refused(api: Api, path: str, name: Any) -> None:
    before = api.snapshot()
    answer = api.request("POST", path, "root", json={"name": name})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert api.snapshot() == before


@pytest.mark.parametrize(("path", "name"), [("/users", "ann"), ("/teams", "red")])
def test_a_name_that_is_taken_is_a_conflict(api: Api, path: str, name: str) -> None:
    answer = api.request("POST", path, "root", json={"name": name})
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")


def test_members_that_nobody_knows_are_refused_by_name(api: Api) -> None:
    answer = api.request("POST", "/users", "root", json={"name": "eve", "is_admin": True})
    assert answer.status_code == 422
    assert "is_admin" in answer.json()["detail"]


def test_enrolling_a_node_again_replaces_its_credential(api: Api) -> None:
    first, second = api.node("node-1"), api.node("node-1")
    assert api.request("POST", "/agent/heartbeat", first.credential, json=first.heartbeat()).status_code == 401
    assert second.beat()["launch"] == []
    assert len(api.get("/nodes")["items"]) == 1


@pytest.mark.parametrize(
    "body",
    [{}, {"name": "x"}, {"name": "..", "address": "h"}, {"name": "x", "address": ""}, {"name": "x", "address": "a b"}],
)
def test_an_enrolment_without_a_name_or_an_address_is_refused(api: Api, body: dict[str, str]) -> None:
    assert api.request("POST", "/agent/enrol", "enrolment", json=body).status_code == 422
    assert api.get("/nodes")["items"] == []
