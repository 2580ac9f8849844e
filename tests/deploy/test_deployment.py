"""The files of deploy/: schema tools accept them, the commands inside parse, and they name what is
there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from torch.distributed.run import get_args_parser

from apbv.launch import batch, serve

from apbv_tests.scripts import ROOT

DEPLOY = ROOT / "deploy"
LWS_SCHEMA = json.loads((Path(__file__).parent / "leaderworkerset.schema.json").read_text())
KUBERNETES = "1.34"
# What LeaderWorkerSet puts into every container's environment, and an example of what.
LWS_ENVIRONMENT = {
    "LWS_LEADER_ADDRESS": "apbv-prefill-0.apbv-prefill.default",
    "LWS_GROUP_SIZE": "2",
}


def compose() -> dict:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def manifests() -> list[dict]:
    """The Kubernetes objects of all files."""
    paths = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return [manifest for path in paths for manifest in yaml.safe_load_all(path.read_text())]


def the(kind: str, name: str | None = None) -> dict:
    (found,) = [
        each
        for each in manifests()
        if each["kind"] == kind and name in (None, each["metadata"]["name"])
    ]
    return found


def group() -> dict:
    return the("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]


# The templates of pods, by the object's name and, in a group, the part.
PODS = {
    each["metadata"]["name"]: each["spec"]["template"]
    for each in manifests()
    if each["kind"] == "Deployment"
}
PODS["apbv-batch"] = the("Job")["spec"]["template"]
PODS |= {f"apbv-prefill {part}": group()[f"{part}Template"] for part in ("leader", "worker")}


def expanded(words: list[str], environment: dict[str, str]) -> list[str]:
    """Words as Kubernetes passes them on, ``$(NAME)`` replaced, or compose,
    ``${NAME:-default}``."""
    words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in words]
    return [re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], word) for word in words]


def parsed(words: list[str], script=serve):
    """A torchrun's options, and those of the script that it starts."""
    program, *rest = words
    assert program == "torchrun"
    torchrun = get_args_parser().parse_args(rest)
    assert torchrun.module and torchrun.training_script == script.__name__
    options = [
        option for option in torchrun.training_script_args if not option.startswith("--media-dir=")
    ]
    assert len(options) == len(torchrun.training_script_args) - 1  # a folder of the container
    return torchrun, script.parse_arguments(options)


def prefill_commands() -> dict[str, list[str]]:
    containers = {
        part: group()[f"{part}Template"]["spec"]["containers"][0] for part in ("leader", "worker")
    }
    return {
        "compose": expanded(compose()["services"]["prefill"]["command"], {}),
        "leader": expanded(
            containers["leader"]["args"], {**LWS_ENVIRONMENT, "LWS_WORKER_INDEX": "0"}
        ),
        "worker": expanded(
            containers["worker"]["args"], {**LWS_ENVIRONMENT, "LWS_WORKER_INDEX": "1"}
        ),
    }


def test_tools_find_nothing_in_the_dockerfile_and_the_compose_file():
    check = "check-jsonschema", "--builtin-schema", "vendor.compose-spec"
    for command in (
        ("hadolint", "--no-color", DEPLOY / "Dockerfile"),
        (*check, DEPLOY / "compose.yaml"),
    ):
        program = shutil.which(command[0], path=str(Path(sys.executable).parent)) or command[0]
        result = subprocess.run(
            [program, *map(str, command[1:])], capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr


def test_compose_names_what_is_there():
    """Images that are built are stages of the Dockerfile; files exist, and networks, volumes and
    services."""
    file = compose()
    stages = set(
        re.findall(r"^FROM \S+ AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    )
    for name, service in file["services"].items():
        if "build" in service:
            assert service["build"]["target"] in stages, name
            context = DEPLOY / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).is_file(), name
        else:
            assert re.search(r":v?\d+\.\d+", service["image"]), f"{name}: no version is pinned"
        for volume in service.get("volumes", []):
            source = expanded([volume], {})[0].split(":")[0]
            assert source in file["volumes"] or (DEPLOY / source).exists(), f"{name}: {source}"
        assert set(service["networks"]) <= set(file["networks"]), name
        assert set(service.get("depends_on", [])) <= set(file["services"]), name


def test_services_share_no_gpu_and_only_the_router_and_the_panels_are_published_to_this_machine():
    services = compose()["services"]
    reserved = [
        each["deploy"]["resources"]["reservations"]
        for each in services.values()
        if "deploy" in each
    ]
    given = [gpu for each in reserved for device in each["devices"] for gpu in device["device_ids"]]
    assert len(given) == len(set(given)) == 8
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert set(published) == {"router", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_prometheus_and_the_router_know_the_services_of_compose():
    config = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    statics = [static for job in config["scrape_configs"] for static in job["static_configs"]]
    targets = [target.split(":") for static in statics for target in static["targets"]]
    services = compose()["services"]
    routers = dict(option.split("=") for option in services["router"]["command"] if "=" in option)
    assert {name for name, _ in targets} == {"prefill", "decode-0", "decode-1", "router"}
    for name, port in targets:
        assert port == (routers["--prometheus-port"] if name == "router" else "8000")
    decoders = {f"--decode=http://{name}:8000" for name in services if name.startswith("decode")}
    assert decoders == {
        word for word in services["router"]["command"] if word.startswith("--decode=")
    }


def test_the_prefill_groups_have_time_to_end():
    """They are not killed before their answers may have ended, by torchrun or by what runs the
    container."""
    torchrun = {}
    for where, words in prefill_commands().items():
        torchrun[where], options = parsed(words)
        assert options.host == "0.0.0.0" and options.port == 8000 and options.kv_transfer == "tcp"
        assert options.grace + 10 <= torchrun[where].shutdown_timeout
    stop = compose()["services"]["prefill"]["stop_grace_period"]
    assert int(stop.removesuffix("s")) > torchrun["compose"].shutdown_timeout
    for part in ("leader", "worker"):
        seconds = group()[f"{part}Template"]["spec"]["terminationGracePeriodSeconds"]
        assert seconds > torchrun[part].shutdown_timeout


def test_each_shard_of_a_batch_has_its_file_and_time_to_end(tmp_path):
    """In an indexed Job and in a Slurm array, whose ``srun`` only says here what it was to run."""
    job = the("Job")["spec"]
    slurm = (DEPLOY / "batch.slurm").read_text()
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    first, last = map(int, re.search(r"--array=(\d+)-(\d+)", slurm).groups())
    assert (first, last) == (0, job["completions"] - 1)
    outs = set()
    for index in range(last + 1):
        pod = job["template"]["spec"]
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SLURM_ARRAY_TASK_ID": str(index),
        }
        said = subprocess.run(
            ["bash", DEPLOY / "batch.slurm"], env=environment, capture_output=True, text=True
        )
        _, *step = said.stdout.splitlines()
        args = expanded(pod["containers"][0]["args"], {"JOB_COMPLETION_INDEX": str(index)})
        grace = {
            "pod": pod["terminationGracePeriodSeconds"],
            "step": int(re.search(r"TERM@(\d+)", slurm)[1]),
        }
        for name, words in {"pod": args, "step": step}.items():
            torchrun, options = parsed(words, batch)
            assert options.shard == (index, last + 1) and torchrun.shutdown_timeout < grace[name]
            outs.add((name, options.out.name))
    assert len(outs) == 2 * (last + 1)


def test_leader_and_worker_run_the_same_command_on_nodes_of_their_own():
    (leader, options), (worker, theirs) = (
        parsed(prefill_commands()[part]) for part in ("leader", "worker")
    )
    assert vars(options) == vars(theirs) and (leader.node_rank, worker.node_rank) == (0, 1)
    assert (
        leader.master_addr == LWS_ENVIRONMENT["LWS_LEADER_ADDRESS"]
        and int(leader.nnodes) == group()["size"]
    )
    gpus = group()["leaderTemplate"]["spec"]["containers"][0]["resources"]["limits"][
        "nvidia.com/gpu"
    ]
    assert leader.nproc_per_node == gpus


def test_kubernetes_accepts_the_manifests_and_the_pods():
    for manifest in manifests():
        if manifest["kind"] == "LeaderWorkerSet":
            jsonschema.validate(manifest, LWS_SCHEMA)
        else:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    for template in PODS.values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **template["metadata"]}}
        kubernetes_validate.validate({**pod, "spec": template["spec"]}, KUBERNETES, strict=True)


def test_pods_mount_their_volumes_have_no_privileges_and_are_probed_where_they_listen():
    for name, template in PODS.items():
        spec = template["spec"]
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        assert spec["securityContext"]["runAsNonRoot"], name
        for container in spec["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} == set(volumes)
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            if "nvidia.com/gpu" in container["resources"]["limits"]:
                assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            for probe in {"startupProbe", "readinessProbe", "livenessProbe"} & container.keys():
                asked = container[probe]["httpGet"]
                assert asked["path"] == "/health" and ports[asked["port"]] == 8000, name


def pods_with(labels) -> list[str]:
    return [
        name
        for name, template in PODS.items()
        if labels.items() <= template["metadata"]["labels"].items()
    ]


def test_services_and_the_router_lead_to_the_pods_that_answer_and_to_no_others():
    for service, pod in (("apbv-prefill-http", "apbv-prefill leader"), ("apbv", "apbv-router")):
        spec = the("Service", service)["spec"]
        assert pods_with(spec["selector"]) == [pod]
        ports = {port["name"] for port in PODS[pod]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in spec["ports"]} <= ports
    arguments = PODS["apbv-router"]["spec"]["containers"][0]["args"]
    given = dict(
        argument.removeprefix("--").split("=", 1) for argument in arguments if "=" in argument
    )
    for option, expected in (
        ("prefill-selector", "apbv-prefill leader"),
        ("decode-selector", "apbv-decode"),
    ):
        assert pods_with(dict([given[option].split("=")])) == [expected]


def test_decoders_may_reach_the_kv_ports_of_all_hosts():
    torchrun, options = parsed(prefill_commands()["leader"])
    rules = the("NetworkPolicy", "apbv-prefill")["spec"]["ingress"]
    decoders = {"app.kubernetes.io/name": "apbv", "app.kubernetes.io/component": "decode"}
    (rule,) = [
        rule for rule in rules if rule["from"] == [{"podSelector": {"matchLabels": decoders}}]
    ]
    num_ports = int(torchrun.nnodes) * int(torchrun.nproc_per_node)
    assert rule["ports"][0]["port"] == options.kv_port
    assert rule["ports"][0]["endPort"] == options.kv_port + num_ports - 1


def test_only_the_router_and_monitoring_ask_decoders():
    """A request straight to a decoder may name any host as its KV's source."""
    spec = the("NetworkPolicy", "apbv-decode")["spec"]
    assert "apbv-decode" in pods_with(spec["podSelector"]["matchLabels"])
    (rule,) = spec["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 8000}]
    peers = [peer["podSelector"]["matchLabels"] for peer in rule["from"] if "podSelector" in peer]
    assert [name for labels in peers for name in pods_with(labels)] == ["apbv-router"]


def vllm_commands() -> list[list[str]]:
    decoders = [
        service for name, service in compose()["services"].items() if name.startswith("decode")
    ]
    container = PODS["apbv-decode"]["spec"]["containers"][0]
    return [*(expanded(each["command"], {}) for each in decoders), container["args"]]


def test_decoders_load_kv_and_see_the_frames_and_the_name_that_the_prefill_group_sees():
    """The KV of other frames, or of another model, would be refused."""
    groups = [parsed(prefill_commands()[where])[1] for where in ("compose", "leader")]
    _, *decoders = vllm_commands()
    for group, words in zip(groups, decoders, strict=True):
        given = dict(
            word.removeprefix("--").split("=", 1) for word in words if word.startswith("--")
        )
        assert json.loads(given["media-io-kwargs"])["video"]["num_frames"] == group.frames
        assert (given["served-model-name"], words[0]) == (group.served_model_name, group.model)
        config = json.loads(given["kv-transfer-config"])
        module = ROOT / config["kv_connector_module_path"].replace(".", "/")
        assert config["kv_role"] == "kv_consumer" and module.is_dir()


def test_vllm_and_the_router_understand_their_commands():
    python = os.environ.get("APBV_VLLM_PYTHON")
    if not python:
        pytest.skip(
            "vLLM's and the router's commands: APBV_VLLM_PYTHON names no environment that has vLLM"
        )
    pod = PODS["apbv-router"]["spec"]["containers"][0]
    routers = [
        compose()["services"]["router"]["command"],
        expanded(pod["args"], {"NAMESPACE": "default"}),
    ]

    script = Path(__file__).with_name("vllm_commands.py")
    commands = {"vllm": vllm_commands(), "router": routers}
    run = {"input": json.dumps(commands), "capture_output": True, "text": True, "check": False}
    result = subprocess.run([python, script], **run)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split().count("ApbvConnector") == len(vllm_commands())
