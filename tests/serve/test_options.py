"""The options of ``apbv serve``: what is refused at the start, and what they set."""

import os

import pytest

from apbv.launch.serve import parse_arguments, settings_of
from apbv.serve.settings import ServerSettings

REFUSED = {
    "--kv-port 5000": "--kv-port needs --kv-transfer",
    "--kv-transfer tcp --kv-port 65535": "--kv-port must leave a port up to 65535",
    "--kv-transfer tcp --kv-port 7999": "--port 8000 is one of the ports 7999 .. 8000",
    "--kv-transfer tcp --reduce dycoke": "--kv-transfer transfers whole prompts",
    "--max-kv-mib 0": "--max-kv-mib: must be a positive number, at most 1e+12, not 0",
    "--port 99999": "--port: must lie in 0 .. 65535, not 99999",
    "--port -1": "--port: must lie in 0 .. 65535, not -1",
    "--max-body-mib 1e308": "--max-body-mib: must be a positive number, at most",
    "--max-queue 99999999999999": "--max-queue: must be a positive integer, at most",
    "--fetch-seconds 1e300": "--fetch-seconds: must be a positive number, at most 86400",
    "--timeout 1e300": "--timeout: must be a positive number, at most 1e+06",
    "--threads 99999999": "--threads: must be",
    "--api-key=": "--api-key: must be a key, or the option left out",
    "--grace=inf": "--grace: must lie in",
    "--reuse kv --reduce dycoke": "dycoke selects visual tokens anew",
}


def test_options_that_make_no_sense_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for options, message in REFUSED.items():
        with pytest.raises(SystemExit):
            parse_arguments(["--model", "demo", *options.split()])
        assert message in capsys.readouterr().err, options


def test_origins_are_as_browsers_send_them(capsys):
    right = [
        "*",
        "null",
        "https://example.com",
        "http://localhost:3000",
        "http://127.0.0.1:8080",
        "http://[::1]:8",
    ]
    right += ["https://a-b.example.co.uk", "chrome-extension://abcdef", "https://x:80"]
    for origin in right:
        assert parse_arguments(["demo", "--cors-origin", origin]).cors_origin == [origin]
    wrong = [
        "https://*.x",
        "https://*",
        "https://x/",
        "https://x/path",
        "x.com",
        "//x",
        "https://",
        "https://x y",
        "x",
    ]
    wrong += [
        "https://X.com",
        "HTTPS://x.com",
        "https://x:443",
        "http://x:80",
        "https://x:",
        "https://x:0",
        "https://x:99999",
    ]
    wrong += [
        "https://u@x",
        "https://x?q",
        "https://x#f",
        "https://x,https://y",
        "https://ü.ch",
        "",
        "https://x..y",
        "NULL",
    ]
    for origin in wrong:
        with pytest.raises(SystemExit):
            parse_arguments(["demo", f"--cors-origin={origin}"])
        assert "--cors-origin: must be *, null or an origin" in capsys.readouterr().err, origin


def test_a_server_without_what_it_needs_or_without_a_model_says_so(monkeypatch, capsys):
    # The fault: a package is missing.
    monkeypatch.setattr("apbv.launch.serve._NEEDED", ("uvicorn", "no_such_package"))
    missing = 'needs no_such_package: pip install -c constraints.txt -e ".[serve]" in'
    for arguments, message in ((["demo"], missing), ([], "give a model")):
        with pytest.raises(SystemExit):
            parse_arguments(arguments)
        assert message in capsys.readouterr().err


def test_every_option_reaches_the_settings(monkeypatch, tmp_path):
    given = f"""--served-model-name m --max-queue 3 --max-num-seqs 2 --max-kv-mib 0.5
        --max-body-mib 2 --grace 7 --max-model-len 99 --max-frames 11 --max-new-tokens 12
        --temperature 0.5 --top-p 0.9 --frames 8 --fps 2 --media-dir {tmp_path}
        --allow-media-host Media.Example --max-media-mib 3 --max-decoded-mib 4 --max-image-mib 5
        --max-packets 9 --fetch-seconds 6"""
    monkeypatch.setenv("APBV_API_KEY", "from the environment")
    settings = settings_of(parse_arguments(["--model", "demo", *given.split()]))
    assert settings.model == "m"
    assert settings.max_queue == 3
    assert settings.max_running == 2
    assert settings.grace == 7
    assert settings.max_kv_bytes == 2**19
    assert settings.max_body_bytes == 2 * 2**20
    assert settings.kv_transfer is None
    assert settings.api_key == "from the environment"
    assert settings.max_model_len == 99
    assert settings.media.max_frames == 11
    assert settings.max_new_tokens == 12
    assert settings.temperature == 0.5
    assert settings.top_p == 0.9
    assert settings.num_frames == 8
    assert settings.fps == 2
    assert settings.media.max_decoded_bytes == 4 * 2**20
    assert settings.media.max_image_bytes == 5 * 2**20
    assert settings.media.max_packets == 9
    assert settings.media.fetch_seconds == 6
    assert settings.media.max_media_bytes == 3 * 2**20
    assert (settings.media_dir, settings.media_hosts) == (tmp_path, {"media.example"})
    assert settings_of(parse_arguments(["demo"])) == ServerSettings(api_key="from the environment")


def test_where_consumers_find_a_process(monkeypatch):
    here = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    for environment, options, expected in (
        (here, "", "127.0.0.1"),
        (here, "--host 192.0.2.7 --kv-host 192.0.2.8", "192.0.2.8"),
        (
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            "",
            None,
        ),  # no loopback
    ):
        monkeypatch.setattr(os, "environ", os.environ | environment)
        options = parse_arguments(["--model", "demo", "--kv-transfer", "tcp", *options.split()])
        found = settings_of(options).kv_transfer
        assert found.host == expected if expected else not found.host.startswith("127.")
        assert (found.port, found.seconds) == (0, 120.0)
