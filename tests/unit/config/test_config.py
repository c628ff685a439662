"""The configuration: five sources, one set of names, refused loudly when wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peercache.config.quantities import (
    exact_size,
    format_address,
    is_loopback,
    parse_address,
    parse_seconds,
    parse_size,
    written_duration,
)
from peercache.config.settings import SETTINGS, SGLANG_KEYS, Config
from peercache.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4GiB", 4 * 2**30),
        ("100gb", 100 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        (" 16 KiB ", 16 * 1024),
        ("2T", 2 * 10**12),
        ("9007199254740993", 9007199254740993),  # not a float: it would lose the last bit
    ],
)
def test_size_is_read_in_every_spelling(text: int | str, size_bytes: int) -> None:
    """Decimal and binary units, any case, with and without a space."""
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "4 gigs", "-1", "1e9", "4GiB extra", True, "٤"])
def test_size_is_refused_when_it_is_none(text: Any) -> None:
    """What is no size raises ValueError instead of becoming a number."""
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:31998", ("10.0.0.1", 31998)),
        ("[::1]:5", ("::1", 5)),
        (":80", ("", 80)),
        ("node-a", ("node-a", 7)),
        ("[fe80::1]", ("fe80::1", 7)),
    ],
)
def test_address_is_read(text: str, address: tuple[str, int]) -> None:
    """IPv4, names and bracketed IPv6, with the default port where none is written."""
    assert parse_address(text, default_port=7) == address


@pytest.mark.parametrize("text", ["::1", "a:b", "host:70000", "[]:1", "host:1:2"])
def test_address_is_refused_when_it_is_none(text: str) -> None:
    """An unbracketed IPv6 address is ambiguous, so it is refused rather than guessed."""
    with pytest.raises(ValueError, match=r"port|PORT"):
        parse_address(text, default_port=7)


@given(st.sampled_from(["node", "10.1.2.3", "::1", "fe80::a"]), st.integers(0, 65_535))
def test_address_survives_writing_and_reading(host: str, port: int) -> None:
    """What `format_address` writes, `parse_address` reads."""
    assert parse_address(format_address(host, port)) == (host, port)


@given(st.integers(0, 2**60))
def test_size_survives_writing_and_reading(size_bytes: int) -> None:
    """What `exact_size` writes, `parse_size` reads, whichever unit fits."""
    assert parse_size(exact_size(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    "name", [name for name, row in SETTINGS.items() if row.allowed and name != "granule"]
)
def test_value_beyond_a_bound_is_refused_in_the_words_of_the_table(name: str) -> None:
    """`--help`, the reference page and the error name the same bounds."""
    row = SETTINGS[name]
    assert row.allowed in row.meaning
    outside: list[Any] = [
        *([] if row.low in (None, 0, 1) else [row.low - 1]),
        *([] if row.high is None or row.kind.unit else [row.high + 1]),
        *([] if row.above is None else [row.above]),
        *([] if row.below is None else [row.below]),
        *(["x" * (row.high + 1), ""] if row.kind.unit else []),
        *([-1] if row.low in (0, 1) and not row.kind.unit else []),
    ]

    assert outside
    for value in outside:
        with pytest.raises(ConfigError, match=name) as caught:
            Config.load({name: value})
        assert row.allowed in str(caught.value) or "share" in str(caught.value)


@pytest.mark.parametrize("source", ["keyword", "file", "environment", "sglang"])
def test_left_over_credentials_are_refused(tmp_path: Path, source: str) -> None:
    """A person who set them believes that they protect; the error names what does."""
    file = tmp_path / "node.toml"
    file.write_text('credentials = "hunter2"\n')
    load = {
        "keyword": lambda: Config.load({"credentials": "hunter2"}),
        "file": lambda: Config.load(file=file),
        "environment": lambda: Config.load(environment={"PEERCACHE_CREDENTIALS": "hunter2"}),
        "sglang": lambda: Config.from_sglang({"credentials": "hunter2"}),
    }[source]

    with pytest.raises(ConfigError, match="credentials") as caught:
        load()

    assert "hunter2" not in str(caught.value)
    for word in ("tls_ca", "insecure = true", "peercache certs"):
        assert word in str(caught.value)


def test_later_sources_win(tmp_path: Path) -> None:
    """Settings beat the environment, which beats the file, which beats the defaults."""
    file = tmp_path / "node.toml"
    file.write_text('pool_size = "1GiB"\ncluster = "file"\nmax_masters = 5\n')

    config = Config.load(
        {"cluster": "flag", "pool_size": None},
        file=file,
        environment={"PEERCACHE_POOL_SIZE": "2GiB", "PEERCACHE_CLUSTER": "environment"},
    )

    assert (config.cluster, config.pool_size, config.max_masters) == ("flag", 2 * 2**30, 5)
    assert config.heartbeat_s == 1.0


def test_environment_of_other_tools_is_ignored() -> None:
    """The prefix is shared with switches of the tests, which are no settings."""
    assert Config.load(environment={"PEERCACHE_TEST_SGLANG": "1", "HOME": "/"}) == Config()


@pytest.mark.parametrize(
    "variable",
    ["PEERCACHE_SERVICE_HOST", "PEERCACHE_SERVICE_PORT", "PEERCACHE_PORT", "PEERCACHE_SOAK_S",
     "PEERCACHE_PORT_31998_TCP_ADDR", "PEERCACHE_TEST_TLS", "PEERCACHE_RDMA_GUEST"],
)  # fmt: skip
def test_variables_of_kubernetes_and_of_tools_are_no_mistakes(variable: str) -> None:
    """A service that is called peercache sets the first ones in every pod of its namespace."""
    assert Config.load(environment={variable: "tcp://10.0.0.7:31998"}) == Config()


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("PEERCACHE_POOL_SIZEE", "PEERCACHE_POOL_SIZE"),
        ("PEERCACHE_POOLSIZE", "PEERCACHE_POOL_SIZE"),
        ("PEERCACHE_pool_size", "PEERCACHE_POOL_SIZE"),
        ("PEERCACHE_DISCOVERY", "PEERCACHE_DISCOVERY_ADDR"),
        ("PEERCACHE_TLS_CRT", "PEERCACHE_TLS_CERT"),
    ],
)
def test_misspelt_variable_is_refused_with_the_one_that_is_meant(variable: str, meant: str) -> None:
    """Ignored, it would leave a default in force that the operator believes to have changed."""
    with pytest.raises(ConfigError, match=f"{variable}.*is {meant} meant"):
        Config.load(environment={variable: "1GiB"})


def test_error_names_the_source_of_the_value(tmp_path: Path) -> None:
    """Of a value in force: a file's name, or a variable's; a flag is named by the setting."""
    file = tmp_path / "node.toml"
    file.write_text('pool_size = "lots"\nsuspect_s = 1\n')

    def reported(settings: dict[str, Any], environment: dict[str, str]) -> str:
        with pytest.raises(ConfigError) as caught:
            Config.load(settings, file=file, environment=environment)
        return str(caught.value)

    assert reported({}, {}).endswith(f"'100gb' (in {file})")
    assert reported({}, {"PEERCACHE_POOL_SIZE": "many"}).endswith(
        "'100gb' (in PEERCACHE_POOL_SIZE)"
    )
    assert reported({"pool_size": "some"}, {"PEERCACHE_POOL_SIZE": "many"}).endswith("'100gb'")
    # An error about two settings names where the first one is set.
    assert reported({"pool_size": "1GiB"}, {}).endswith(f"more than 2 heartbeat_s (in {file})")


def test_sglang_keys_pass_and_a_typo_does_not() -> None:
    """SGLang's own keys are not ours; anything else unknown is a typo that a person must see."""
    extra: dict[str, Any] = dict.fromkeys(SGLANG_KEYS, "x")

    assert Config.from_sglang({**extra, "pool_size": "1GiB"}).pool_size == 2**30
    with pytest.raises(ConfigError, match=r"'pool_sise'.*pool_size"):
        Config.from_sglang({**extra, "pool_sise": "1GiB"})


@pytest.mark.parametrize(
    ("written", "seconds"),
    [(90, 90.0), ("1.5", 1.5), ("90s", 90.0), ("15m", 900.0), ("2h", 7200.0), ("10d", 864_000.0),
     ("250ms", 0.25), ("1e3", 1000.0)],
)  # fmt: skip
def test_a_duration_has_a_unit_or_is_seconds(written: object, seconds: float) -> None:
    """The same in a flag, a file and the environment; written_duration is the inverse."""
    assert Config.load({"disk_ttl": written}).disk_ttl == seconds
    assert parse_seconds(written_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("pool_size", "lots", "GiB"),
        ("pool_size", 1, "granule"),
        ("granule", 5000, "power of two"),
        ("granule", 2048, "4KiB or more"),
        ("fabric", "rdmaa", "auto, shm, tcp"),
        ("verify", "never", "generation, sampled, full"),
        ("log_level", "trace", "debug, info"),
        ("heartbeat_s", "soon", "seconds"),
        ("heartbeat_s", float("nan"), "finite"),
        ("heartbeat_s", "2x", "'90s', '15m'"),
        ("heartbeat_s", "1.2.3s", "'10d'"),
        ("op_timeout_s", float("inf"), "finite"),
        ("op_timeout_s", 0, "more than 0"),
        ("op_timeout_s", True, "seconds"),
        ("exists_timeout_s", -1, "more than 0"),
        ("max_masters", 1.5, "whole number"),
        ("max_masters", float("inf"), "whole number"),
        ("max_masters", True, "whole number"),
        ("max_masters", None, None),
        ("max_masters", 0, "1 or more"),
        ("metrics_port", -2, "-1 to 65535"),
        ("data_port", 65_536, "65535"),
        ("tcp_serving_threads", 65, "0 to 64"),
        ("suspect_s", 2.0, "2 heartbeat_s"),
        ("dead_s", 3.0, "suspect_s"),
        ("directory_replicas", "all", "must be a whole number, or 'auto'"),
        ("directory_replicas", 0, "1 or more"),
        ("home", "/run/peercache", "ipc://PATH"),
        ("home", "ipc://", "ipc://PATH"),
        ("home", "ipc:///" + "x" * 120, "100 bytes"),
        ("listen", "::1", "HOST:PORT"),
        ("discovery_addr", ":31998", "connect"),
        ("discovery_addr", "host:0", "connect"),
        ("discovery_addr", 31998, "HOST:PORT"),
        ("disk_free_floor", "half", "share from 0 to 1"),
        ("cluster", "", "1 to 255"),
        ("cluster", 7, "string"),
        ("tls_ca", "ca.crt", "set all three, or none"),
        ("tls_key", 7, "string"),
        ("insecure", "ann", "write insecure = true, and cluster = 'ann'"),
        ("insecure", 7, "true or false"),
        ("rdma_timeout_ms", 0, "more than 0"),
        ("rdma_timeout_ms", "soon", "finite number"),
        ("rdma_timeout_ms", True, "finite number of milliseconds"),
        ("rdma_timeout_ms", float("nan"), "finite number of milliseconds"),
        ("rdma_timeout", 14, "rdma_timeout_ms has the time"),
        ("virtual_nodes", 160, "is gone"),
        ("share_uids", "ann,b c", "'b c' is no user's name or number"),
        ("share_uids", "-1", "no user's name"),
        ("nonsense", 7, "no such name"),
    ],
)
def test_wrong_value_names_the_key_and_what_is_allowed(
    name: str, value: Any, allowed: str | None
) -> None:
    """One clear error, before anything starts; None stands for "not given"."""
    if allowed is None:
        assert Config.load({name: value}) == Config()
        return
    with pytest.raises(ConfigError) as caught:
        Config.load({name: value})
    assert caught.value.name == name
    assert allowed in str(caught.value)


def test_unreadable_file_names_the_file(tmp_path: Path) -> None:
    """A missing, malformed or binary TOML file is a ConfigError that names it."""
    (tmp_path / "broken.toml").write_text("pool_size = ")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")

    for name in ("broken.toml", "binary.toml", "missing.toml"):
        with pytest.raises(ConfigError, match=re.escape(name)):
            Config.load(file=tmp_path / name)


def test_table_in_the_file_is_reported_as_such(tmp_path: Path) -> None:
    """Other programs have tables, so people write one; the names in it are right."""
    file = tmp_path / "settings.toml"
    file.write_text('[node]\npool_size = "4GiB"\n')

    with pytest.raises(ConfigError, match=r"settings.toml has a table \[node\]"):
        Config.load(file=file)


def test_misspelt_name_is_answered_with_the_one_that_is_meant() -> None:
    """A name unlike all others leads to the list."""
    with pytest.raises(ConfigError, match=r"'pool_sise': .* is pool_size meant"):
        Config.load({"pool_sise": "4GiB"})
    with pytest.raises(
        ConfigError, match=r"'qqq': there is no such name; `peercache config` lists"
    ):
        Config.load({"qqq": 1})


def test_discovery_takes_one_address_or_several() -> None:
    """A string with commas and a list are the same, and the port may be left out."""
    text = Config.load({"discovery_addr": "a, b:5,[::1]", "insecure": True})
    several = Config.load({"discovery_addr": ["a:31998", "b:5", "[::1]:31998"], "insecure": True})

    assert text.discovery_addr == several.discovery_addr == ("a:31998", "b:5", "[::1]:31998")
    assert Config.load({"discovery_addr": ""}).discovery_addr == ()


def test_config_is_frozen_and_every_field_is_explained() -> None:
    """Nothing changes after the start, and the table of settings has a sentence for each name."""
    config = Config.load()

    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.pool_size = 1  # type: ignore[misc]
    for name, row in SETTINGS.items():
        assert row.help.endswith("."), name
        assert row.meaning.startswith(row.help), name


def test_defaults_are_valid_and_survive_their_own_converters() -> None:
    """The defaults obey the rules of all values."""
    defaults = {name: getattr(Config(), name) for name in SETTINGS}

    assert Config.load(defaults) == Config()


@given(
    st.dictionaries(
        st.sampled_from(sorted(SETTINGS)),
        st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.lists(st.text())),
    )
)
def test_any_json_gives_a_config_or_a_config_error(settings: dict[str, Any]) -> None:
    """The only exception is the one a person can read."""
    try:
        config = Config.load(settings)
    except ConfigError:
        return

    assert Config.load({name: getattr(config, name) for name in SETTINGS}) == config


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("on", True), (True, True), ("0", False), ("No", False)]
)
def test_switch_is_written_in_any_usual_way(text: object, value: bool) -> None:
    """A flag, a TOML file and the environment each have their own way."""
    assert Config.load({"disk_enabled": text}).disk_enabled is value


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("disk_enabled", "perhaps"),
        ("disk_free_floor", "1.5"),
        ("disk_free_floor", 1),
        ("disk_size", "1MiB"),
        ("disk_ttl", -1),
        ("write_policy", "back"),
    ],
)
def test_wrong_disk_setting_is_refused_by_its_name(name: str, wrong: object) -> None:
    """The error names the setting."""
    with pytest.raises(ConfigError, match=name):
        Config.load({name: wrong})


TLS = {"tls_ca": "ca.crt", "tls_cert": "node-a.crt", "tls_key": "node-a.key"}


def test_certificates_are_given_whole() -> None:
    """A node that has a certificate and no authority would admit every peer, or none."""
    assert Config.load(TLS).has_tls
    assert not Config().has_tls
    for name in TLS:
        with pytest.raises(ConfigError, match="set all three, or none"):
            Config.load({key: value for key, value in TLS.items() if key != name})


def test_a_trial_is_a_switch_next_to_the_name_of_the_cluster() -> None:
    """Texts that mean a switch are one."""
    assert not Config().insecure
    for value in (True, "true", "on", "1"):
        config = Config.load({"insecure": value, "cluster": "ann"})
        assert (config.insecure, config.cluster) == (True, "ann")


@pytest.mark.parametrize(
    ("milliseconds", "power"),
    [(67, 14), ("67ms", 14), ("0.067s", 14), (67.2, 15), (4, 10), (0.001, 1), (60_000, 24)],
)
def test_the_timeout_of_a_packet_is_the_next_one_that_devices_have(
    milliseconds: Any, power: int
) -> None:
    """InfiniBand has 4.096 µs × 2^n."""
    assert Config().rdma_timeout == 14
    assert Config.load({"rdma_timeout_ms": milliseconds}).rdma_timeout == power


def test_a_trial_has_no_certificates() -> None:
    """One of the two was forgotten, and only a person knows which."""
    with pytest.raises(ConfigError, match="'insecure': is for trials"):
        Config.load({"insecure": True, **TLS})


@pytest.mark.parametrize(
    ("settings", "may"),
    [
        ({}, True),
        ({"fabric": "rdma"}, True),
        ({"fabric": "tcp"}, False),
        (TLS, False),
        ({**TLS, "rdma_clear_text": True}, True),
        ({**TLS, "rdma_clear_text": True, "fabric": "rdma"}, True),
        ({**TLS, "rdma_clear_text": True, "fabric": "shm"}, False),
    ],
)
def test_rdma_with_tls_is_asked_for(settings: dict[str, Any], may: bool) -> None:
    """RDMA is clear text: a cluster with certificates uses it where a person allows it."""
    assert Config.load(settings).may_use_rdma is may


def test_rdma_alone_with_tls_wants_a_word() -> None:
    """Falling back to tcp is not what `fabric = rdma` asks for."""
    with pytest.raises(ConfigError, match="rdma_clear_text = true"):
        Config.load({**TLS, "fabric": "rdma"})


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True),
        ("", False), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("node-a", False),
        ("localhost.example", False), ("::ffff:10.0.0.1", False),
    ],
)  # fmt: skip
def test_loopback_is_what_only_this_host_reaches(host: str, expected: bool) -> None:
    """A name other than localhost may resolve to any address."""
    assert is_loopback(host) is expected


def test_users_are_names_or_numbers() -> None:
    """TOML and SGLang's JSON may write a number without quotes."""
    assert Config.load({"share_uids": "sglang, 65532"}).share_uids == ("sglang", "65532")
    assert Config.load({"share_uids": 65532}).share_uids == ("65532",)
    assert Config.load({"share_uids": ["sglang"]}).share_uids == ("sglang",)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("127.0.0.1", 31998)),
        ({"insecure": True}, ("", 31998)),
        (TLS, ("", 31998)),
        ({"listen": "127.0.0.1:0"}, ("127.0.0.1", 0)),
        ({"listen": "[::1]:7"}, ("::1", 7)),
        ({"listen": "localhost"}, ("localhost", 31998)),
        ({**TLS, "listen": "127.0.0.1"}, ("127.0.0.1", 31998)),
        ({**TLS, "listen": "10.0.0.7:5"}, ("10.0.0.7", 5)),
        ({"insecure": True, "listen": ":5"}, ("", 5)),
    ],
)
def test_only_this_host_reaches_a_node_unless_it_is_configured_otherwise(
    settings: dict[str, Any], expected: tuple[str, int]
) -> None:
    """Certificates, or the word that there are none, open the listeners."""
    assert Config.load(settings).listen_address() == expected


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:0", ":31998", "[::]:0", "10.0.0.7", "gpu-7:31998", "*:5", "203.0.113.7:1"]
)
def test_open_address_without_certificates_is_refused(listen: str) -> None:
    """The error names both ways out."""
    with pytest.raises(ConfigError) as caught:
        Config.load({"listen": listen})

    assert caught.value.name == "listen"
    assert "peercache certs" in str(caught.value)
    assert "insecure = true" in str(caught.value)


def test_node_on_loopback_joins_no_other_host() -> None:
    """The others could not call back, and its Hello would travel in clear text."""
    with pytest.raises(ConfigError, match="'discovery_addr': names another host"):
        Config.load({"discovery_addr": "127.0.0.1:1,gpu-7:31998"})
    for more in ({"insecure": True}, TLS):
        assert Config.load({"discovery_addr": "gpu-7:31998", **more})
    assert Config.load({"discovery_addr": "127.0.0.1:1,[::1]:5,localhost:7"})


@pytest.mark.parametrize(
    ("settings", "in_process", "expected"),
    [
        ({}, False, ("127.0.0.1", -1)),
        ({}, True, None),
        ({"metrics_port": 0}, False, None),
        ({"metrics_port": 9}, True, ("127.0.0.1", 9)),
        ({"http_listen": "127.0.0.1"}, True, ("127.0.0.1", -1)),
        ({"http_listen": "[::1]:7"}, False, ("::1", 7)),
        ({"http_listen": "0.0.0.0", "http_open": True}, False, ("0.0.0.0", -1)),
        ({"http_listen": ":7", "http_open": True, "metrics_port": 7}, False, ("", 7)),
        ({"http_listen": ":7", "insecure": True}, False, ("", 7)),
        ({"http_listen": "10.0.0.1:7", **TLS}, False, ("10.0.0.1", 7)),
        ({"insecure": True}, False, ("127.0.0.1", -1)),
        (TLS, False, ("127.0.0.1", -1)),
    ],
)
def test_http_has_a_switch_of_its_own(
    settings: dict[str, Any], in_process: bool, expected: tuple[str, int] | None
) -> None:
    """Opening the node to others does not open its pages of state."""
    assert Config.load(settings).http_address(in_process=in_process) == expected


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"http_listen": "0.0.0.0"}, "http_open = true"),
        ({"http_listen": ":80"}, "http_open = true"),
        ({"http_listen": "127.0.0.1:80", "metrics_port": 81}, "metrics_port"),
        ({"http_listen": "127.0.0.1", "metrics_port": 0}, "metrics_port"),
        ({"http_listen": "::1"}, "HOST:PORT"),
    ],
)
def test_http_address_that_contradicts_itself_is_refused(
    settings: dict[str, Any], problem: str
) -> None:
    """Clear text beyond loopback wants a word."""
    with pytest.raises(ConfigError, match="'http_listen'") as caught:
        Config.load(settings)

    assert problem in str(caught.value)
