"""What a user gets for each way of getting words or a job's file wrong: one line, exit code 2, nothing left."""

# One row of the table on one line reads better than five.
# ruff: noqa: E501

from __future__ import annotations

import errno
import os
import shlex
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest

from stoker.config.loading import load
from stoker_launcher.job import open_job
from stoker_launcher.notebook import plan
from tests.clouds import WORDS, changes_of, full
from tests.clouds import words as words_of
from tests.command_line import type_command
from tests.refusals import refused as refused_by

GOOD = "name: job\nrecipe: rows:Counting\n"
ROWS = (Path(__file__).parents[1] / "recipes" / "rows.py").read_text()


def table(text: str) -> list[tuple[str, str]]:
    """The rows of a table of two columns."""
    rows = (line.split("  →  ") for line in text.strip().splitlines())
    return [(typed, said.strip()) for typed, said in rows]


FILES = table(r"""
trian: {epochs: 3}  →  job.yaml: trian: unknown key; did you mean train?
train: {epoch: 3}  →  train.epoch: unknown key; did you mean epochs?
batch_size: 3  →  batch_size: unknown key; did you mean train.batch_size?
train: {epochs: many}  →  train.epochs: input should be a valid integer
data: {order: exakt}  →  data.order: input should be 'any' or 'exact' (got 'exakt')
data: {bad_record_budget: 2}  →  should be less than or equal to 1 (got 2)
name: 'two words'  →  job.yaml: name:
seed: 1\nseed: 2  →  the key 'seed' stands twice
train: [1, 2  →  job.yaml: not valid YAML: line
params: {a: *b}  →  not valid YAML: line 1, column 13: found undefined alias
params: {day: 2024-02-30}  →  job.yaml: not valid YAML:
params: {x: !!int ''}  →  job.yaml: not valid YAML:
params: {x: !!python/object:os.system {}}  →  could not determine a constructor for the tag
1: x  →  job.yaml:
output_dir: $NO_SUCH/x  →  output_dir: $NO_SUCH is not set
params: {data: ~nobody-here/x}  →  params.data: ~nobody-here is no user's home
- train  →  holds a list, not keys and values
train:\n\tepochs: 3  →  not valid YAML: line 2, column 1: found character '\t'
output_dir: /proc/x  →  output_dir: /proc/x cannot be written
output_dir: /etc/passwd  →  output_dir: /etc/passwd cannot be written
data: {prepare: 'recipes.none:write'}  →  no module recipes.none
name: 3  →  name: input should be a valid string (got 3)
name: a/b  →  up to 63 letters, digits, - _ and ., beginning with
seed: -1  →  seed: input should be greater than or equal to 0
seed: 1.5  →  got a number with a fractional part (got 1.5)
recipe: ''  →  recipe: must not be empty (got '')
tracking: {mlflow: {uri: ''}}  →  tracking.mlflow.uri: must not be empty; null for none (got '')
recipe: stoker.train.lightning_recipe:LightningRecipe  →  --kind lightning
script: ''  →  script: must not be empty
args: 3  →  args: must be a list, such as [a, b] (got 3)
params: [1]  →  params: input should be a valid dictionary
train: 3  →  train: has keys of its own: epochs, max_steps, batch_size
sagemaker: {gpu: ml.g5.xlarge}  →  gpu: has keys of its own: type, count
sagemaker: {prices: {ml.g5.xlarge: -1}}  →  ml.g5.xlarge: input should be greater than or equal to 0
train: {lr: inf}  →  train.lr: input should be a finite number
train: {lr: 0}  →  train.lr: input should be greater than 0
train: {epochs: true}  →  train.epochs: must be a number (got True)
train: {epochs: 010}  →  line 1, column 17: 010 is 8 in YAML; quote it if it is text, or write the plain
train: {max_steps: 1:30}  →  line 1, column 20: 1:30 is 90 in YAML
params: {rate: 1:30.5}  →  1:30.5 is 90.5 in YAML
sagemaker: {prices: {ml.g5.xlarge: yes}}  →  sagemaker.prices: must be a number
rehearsal: {join_delay: {algo-3: true}}  →  rehearsal.join_delay: must be a number
rehearsal: {join_delay: {algo-3: -5}}  →  algo-3: must be a number of seconds from 0, or never
data: {remainder: true}  →  data.remainder: must be a number (got True)
train: {precision: bfloat16}  →  input should be 'fp32', 'bf16' or 'fp16'
train: {ema_decay: 2}  →  train.ema_decay: input should be less than 1
train: {early_stopping: {patience: 5}}  →  monitor is required
data: {cache: disk, cache_folder: x}  →  cache_folder requires cache: disk and an
data: {cache_gb: 1}  →  cache_gb requires cache: memory or cache: disk
data: {cache_share: 0.5}  →  cache_share requires cache: memory or cache: disk
data: {preprocess_on: cpu}  →  must be a list, such as [a, b] (got 'cpu')
data: {remainder: keep}  →  data.remainder: must be drop, pad or a number
data: {remainder: 2.5}  →  data.remainder: must be drop, pad or a number
cluster: {port: 99999}  →  cluster.port: input should be less than or equal
cluster: {cpu_hosts: {min: 3, max: 2}}  →  cluster.cpu_hosts: min (3) is larger than max (2)
cluster: {cpu_hosts: {max: 2, usd_per_hour: 1}}  →  set both usd_per_hour and rest_usd_per_hour
cluster: {cpu_hosts: {max: 2}}  →  cluster.cpu_hosts: with --on local hosts cannot be added
tracking: {mlflow: {uri: 'http://me:secret@host'}}  →  mlflow.uri: contains a user name or password
tracking: {mlflow: {uri: 'host:5000'}}  →  tracking.mlflow.uri: must be an address: http://host:5000
tracking: {mlflow: true}  →  tracking.mlflow: has keys of its own: uri,
tracking: {sinks: [nope]}  →  has the wrong form: additional event sinks
export: onnx  →  export: must be a list, such as [a, b] (got 'onnx')
export: [onxx]  →  input should be 'safetensors', 'torch_export', 'onnx' or
? [a]\n: b  →  not valid YAML: line 1, column 3: a key must be text
!!python/object:os.system x  →  could not determine a constructor for the tag
""")
"""What is in the job's file → a part of the line, mostly with its key."""

ALIASES = (("a", "b"), ("b", "c"), ("c", "d"), ("d", "e"), ("e", "f"), ("f", "g"))
LARGE = {
    "params: " + "[" * 3000 + "]" * 3000: "not valid YAML: it is nested too deeply",
    "params:\n  a: &a [x,x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"  {n}: &{n} [{','.join(['*' + p] * 10)}]\n" for p, n in ALIASES): (
        "or it holds more than 1,000,000 values"
    ),
}
"""YAML that its reader must go through at length to refuse it."""

COMMANDS = table("""
job.yaml --dry-run 'export=[&a [*a]]'  →  export: must be a list
job.yaml --dry-run --source-dir=$NO_SUCH  →  --source-dir=$NO_SUCH: $NO_SUCH is not
job.yaml --dry-run train.epochs  →  'train.epochs' is not of the form key=value
job.yaml --dry-run seed.x=1  →  seed is a value, not a section
job.yaml --dry-run train.lr=fast  →  command line: train.lr:
job.yaml --dry-run --on sagemakr  →  --on sagemakr: no such place
job.yaml --dry-run --source-dir nowhere  →  nowhere: no such folder
job.yaml --dry-run train.strategy=fdsp  →  train.strategy: has the wrong form: ddp: replicate the model
job.yaml --dry-run train.epochs=-1  →  train.epochs: input should be greater than or equal
job.yaml --dry-run =3  →  command line: '=3': the key has an empty part
job.yaml --dry-run -- --lr 3  →  args: requires a script
job.yaml --dry-run train.py --lr 3  →  ; a script's own arguments go after --
job.yaml --dry-run --dryrun  →  No such option: --dryrun (Possible options: --driver, --dry-run)
job.yaml --dry-run --address http://h:1  →  --address: is not supported with --on
remote.yaml --dry-run --on ray  →  --address: needed with --on ray
remote.yaml --dry-run --dashboard --on rehearsal  →  --dashboard: is not supported with --on rehearsal
job.yaml --dry-run --dashboard --on vertex  →  --dashboard: is not supported with --on vertex
remote.yaml --dry-run --on rehearsal cluster.dashboard=true  →  cluster.dashboard: only for local runs
remote.yaml --dry-run --on ray --address head:8265  →  jobs go to the dashboard, http://<head>:8265
remote.yaml --dry-run --on rehearsal rehearsal.hosts=gpu  →  'gpu' is not group=count
remote.yaml --dry-run --on rehearsal rehearsal.faults=explode:algo-1  →  'explode:algo-1' is not action:host@20s
job.yaml --dry-run --resume nowhere  →  --resume nowhere: no such folder
job.yaml --dry-run --resume /proc/sys  →  neither a run directory nor a folder
job.yaml --dry-run data.prepare=recipes.digits:wirte  →  has no wirte; did you mean write?
jobs/job.yaml --on  →  Option '--on' requires an argument
jobs  →  jobs: is a folder; did you mean jobs/job.yaml?
empty  →  empty: is a folder; name a job's YAML file
train.epochs=3  →  before overrides: JOB.yaml train.epochs=3
fin.py  →  script: no file fin.py; did you mean fine.py?
check ./jobs/../fin.py  →  no such script; did you mean jobs/../fine.py?
broken.py  →  script: broken.py is not Python: invalid syntax (line 1)
fine.py train.lr=3  →  train.lr: has no effect on a script
binary.yaml  →  binary.yaml: cannot be read as text
status  →  runs/latest: there is no run yet; start one
logs  →  runs/latest: there is no run yet
report  →  runs/latest: not a run directory
status nowhere  →  nowhere: not a run directory, nor an id
logs nowhere  →  nowhere: not a run directory
stop nowhere  →  nowhere: not a run directory
status sagemaker:x  →  write sagemaker:<region>/x
status ray:foo  →  ray:http://<head>:8265/<job>
report nowhere  →  nowhere: not a run directory
report jobs  →  jobs: not a run directory (no summary.json in it)
compare nowhere  →  nowhere: not a run directory
size fine.py  →  size: needs a recipe
size jbos/job.yaml  →  jbos/job.yaml: no such configuration file
check jobs/job.yaml  →  is a job's configuration; measure it with `size jobs/job.yaml`
check  →  SCRIPT: none given
check fine.py --steps 0  →  --steps: must be at least 10 (got 0)
check fine.py --gpu ml.c5.xlarge  →  --gpu ml.c5.xlarge: has no GPU
check fine.py --timeout -5  →  --timeout: must be more than 0 seconds (got -5)
status a b  →  Got unexpected extra argument(s) (b)
check fine.py --steps x  →  Invalid value for '--steps'
statsu runs/latest  →  statsu: no such command or file; did you mean status?
reprot runs/latest  →  did you mean report?
trian runs/latest  →  did you mean train.py?
flowers runs/latest  →  did you mean flowers.yaml?
qqq runs/latest  →  qqq: no such command or file; commands: run,
jobs.yaml  →  jobs.yaml: no such configuration file; did you mean
nothing.yaml  →  nothing.yaml: the file is empty
init --kind image  →  --kind image: no such kind (known: images, segmentation, text, tabular, script,
init /proc/nothing --kind text  →  /proc/nothing: cannot be written:
size job.yaml --gpu ml.g5.xlarg  →  --gpu ml.g5.xlarg: unknown instance type; did you
size job.yaml --cpu ml.g5.xlarge  →  --cpu ml.g5.xlarge: has a GPU
size job.yaml --gpu ml.c5.xlarge  →  --gpu ml.c5.xlarge: has no GPU
size job.yaml --gpu-samples-per-s many  →  --gpu-samples-per-s many: give samples per second
size job.yaml --gpu-samples-per-s B7=4  →  --gpu-samples-per-s B7=4: no GPU 'B7'; known: A100-40GB,
size job.yaml --gpu-samples-per-s -1  →  --gpu-samples-per-s -1: give samples per second
size job.yaml --max-cpu-hosts -1  →  --max-cpu-hosts: must be at least 0 (got -1)
size job.yaml --cpu-speed 0  →  --cpu-speed: must be between 0 and 10 (got 0.0)
size job.yaml --from nowhere  →  --from nowhere: no run there
size job.yaml train.epochs=0  →  train.epochs
size job.yaml sagemaker.prices={ml.g5.xlarge:-1}  →  sagemaker.prices
peek job.yaml --n 0  →  --n: between 1 and 512 (got 0)
peek job.yaml --split test  →  --split: train or val (got 'test')
peek job.yaml --rank 1  →  --rank: selects a train worker of a run; add --step N
peek job.yaml --out /none/x.html  →  --out /none/x.html: /none does not exist
peek fine.py  →  peek: needs a recipe; a script reads its own data
slurm.yaml --on slurm output_dir=runs  →  output_dir: must be an absolute folder
slurm.yaml --on slurm output_dir=/shared/%u  →  output_dir: '/shared/%u' has characters
slurm.yaml --on slurm slurm.cpu.partition=cpu  →  slurm.cpu:
slurm.yaml --on slurm slurm.gpu.gpus=0  →  slurm.gpu.gpus:
slurm.yaml --on slurm slurm.cpu.gpus=1  →  slurm.cpu.gpus:
slurm.yaml --on slurm slurm.max_runtime_s=200  →  slurm.max_runtime_s:
slurm.yaml --on slurm slurm.gpu.extra=[--time=1:00:00]  →  slurm.gpu.extra: --time is Stoker's to set
slurm.yaml --on slurm slurm.gpu.extra=[--part=long]  →  slurm.gpu.extra: --partition is Stoker's
slurm.yaml --on slurm slurm.gpu.extra=[--test-only]  →  slurm.gpu.extra: --test-only
slurm.yaml --on slurm slurm.gpu.extra=[--wait]  →  slurm.gpu.extra: --wait
slurm.yaml --on slurm slurm.gpu.extra=[r=x]  →  slurm.gpu.extra: 'r=x' must have the form
slurm.yaml --on slurm slurm.image=x.sif slurm.mounts=[/data]  →  slurm:
slurm.yaml --on slurm "slurm={setup: ['#SBATCH --mem=4G']}"  →  slurm.setup[0]: #SBATCH lines belong
slurm.yaml --on slurm "slurm={setup: ['export API_KEY=abc123']}"  →  slurm.setup[0]: API_KEY looks like
slurm.yaml --on slurm --address http://h:1  →  --address:
slurm.yaml --on slurm cluster.cpu_hosts.max=2  →  cluster.cpu_hosts:
slurm.yaml --on slurm --resume auto  →  --resume auto:
remote.yaml --on rehearsal --dry-run rehearsal.hosts=gpu=0  →  rehearsal.hosts:
remote.yaml --on rehearsal --dry-run rehearsal.hosts=gpu=1,gpu=2  →  rehearsal.hosts:
remote.yaml --on rehearsal --dry-run rehearsal.hosts=a=1,b=1,c=1,d=1,e=1,gpu=1  →  rehearsal.hosts:
remote.yaml --on rehearsal --dry-run rehearsal.hosts=a=1,b=1  →  cluster.gpu_group:
remote.yaml --on rehearsal --dry-run "rehearsal.join_delay={algo-9: 3}"  →  rehearsal.join_delay:
remote.yaml --on rehearsal --dry-run rehearsal.faults=[kill:algo-9@3s]  →  rehearsal.faults:
remote.yaml --on rehearsal --dry-run rehearsal.faults=[burn:algo-1@3s]  →  rehearsal.faults:
remote.yaml --on rehearsal --dry-run rehearsal.faults=[kill:algo-1]  →  rehearsal.faults:
remote.yaml --on rehearsal --dry-run rehearsal.faults=['kill:algo-1@/(/']  →  rehearsal.faults:
remote.yaml --on rehearsal --dry-run cluster.gpu_group=gpus  →  cluster.gpu_group:
job.yaml --show-config --source-dir . recipe=price:Prices  →  recipe: no module price in
job.yaml --show-config --source-dir . recipe=prces:Prices  →  did you mean prices?
job.yaml --show-config --source-dir . recipe=prices:Price  →  has no Price; did you mean Prices?
job.yaml --show-config --source-dir . recipe=prices.Prices  →  'prices.Prices' is not of the form
job.yaml --show-config --source-dir . recipe=ImageClassificaton  →  did you mean ImageClassification?
job.yaml --show-config --source-dir . recipe=unclosed:Prices  →  SyntaxError:
job.yaml --show-config --source-dir . recipe=needy:Prices  →  needs the module 'timmm', which is not installed
""")
"""What is typed → a part of the line, mostly with its key."""


def many(entry: str, count: int) -> str:
    """A list, or a mapping, of entries in which N is the number."""
    entries = ", ".join(entry.replace("N", str(number)) for number in range(count))
    return f"[{entries}]" if entry.startswith("{") else f"{{{entries}}}"


def pools(*kinds: str) -> str:
    listed = (f"{{name: {kind.split()[0]}, machine_type: {kind.split()[1]}}}" for kind in kinds)
    return f"{NO_POOL}; pools=[{', '.join(listed)}]"


N1 = "gpu.machine_type=n1-standard-8"
NO_PAIR, NO_POOL = "gpu.type=null; cpu.type=null", "gpu.machine_type=null; cpu.machine_type=null"
CLOUDS: dict[str, dict[str, list[str]]] = {
"sagemaker": {
    "gpu.type": [NO_PAIR, "gpu.type=ml.g5.3xlarge"],
    "groups": ["groups=[{name: x, type: ml.c5.xlarge}]", f"{NO_PAIR}; groups={many('{name: gN, type: ml.c5.xlarge}', 6)}"],
    "groups.0.name": [f"{NO_PAIR}; groups=[{{name: {'a' * 65}, type: ml.g5.xlarge}}, {{name: b, type: ml.c5.xlarge}}]"],
    "cluster.gpu_group": [f"{NO_PAIR}; groups=[{{name: a, type: ml.c5.xlarge}}, {{name: b, type: ml.c5.xlarge}}]", "cluster.gpu_group=trainers"],
    "cluster.min_cpu_hosts": ["cluster.min_cpu_hosts=3"],
    "data.preprocess_on": ["data.preprocess_on=[data_group]"],
    "train.workers": ["train.workers=2"],
    "checkpoint.dir": ["checkpoint.dir=ckpt"],
    "keep_alive_s": ["cpu.type=null; keep_alive_s=30000"],
    "max_retries": ["max_retries=0", "max_retries=31"],
    "kms_key": ["kms_key=my key"],
    "security_groups": ["subnets=[subnet-1]", "subnets=[subnet-1]; security_groups=[sg-1, sg-2, sg-3, sg-4, sg-5, sg-6]"],
    "subnets": ["security_groups=[sg-1]", "subnets=[subnet-a b]; security_groups=[sg-1]"],
    "entry": ["network_isolation=true; entry=script-mode"],
    # what has no key of its own, or has one
    "request.ResourceConfig.TrainingPlan": ["request={ResourceConfig: {TrainingPlan: x}}"],
    "request.ResourceConfig.TrainingPlanArn": ["request={ResourceConfig: {TrainingPlanArn: mine}}"],
    "request.StoppingCondition.MaxPendingTimeInSeconds": ["request={StoppingCondition: {MaxPendingTimeInSeconds: 60}}", "request={StoppingCondition: {MaxPendingTimeInSeconds: soon}}"],
    "request.StoppingCondition.MaxRuntimeInSeconds": ["request={StoppingCondition: {MaxRuntimeInSeconds: 60}}"],
    "request.StoppingCondition": ["request={StoppingCondition: 60}"],
    "request.RetryStrategy.MaximumRetryAttempts": ["request={RetryStrategy: {MaximumRetryAttempts: 3}}"],
    "request.Environment": ["request={Environment: {HF_TOKEN: x}}"],
    "request.OutputDataConfig.KmsKeyId": ["request={OutputDataConfig: {KmsKeyId: x}}"],
    "request.RoleArn": ["request={RoleArn: x}"],
    "request.MlflowConfig.MlflowRunName": ["request={MlflowConfig: {MlflowRunName: x}}"],
    "request.InputDataConfig": ["request={InputDataConfig: [{ChannelName: a}]}"],
    "queue_request": ["queue_request={schedulingPriority: 3}"],
    "queue_request.jobName": ["queue=q; queue_request={jobName: x}"],
    # channels and parameters
    "channels.code": ["channels={code: {uri: 's3://b/x'}}"],
    "channels.my data": ["channels={'my data': {uri: 's3://b/x'}}; params={my data: x}"],
    "channels.data.uri": ["channels={data: {uri: /data/train}}", "channels={data: {uri: 'https://b.s3.amazonaws.com/x'}}"],
    "channels": [f"channels={many('cN: {uri: s3://b/N}', 20)}; params={many('cN: x', 20)}"],
    "params.data": ["params.data=./no/such/folder", "params.data=/etc/host*", "params.data=/opt/ml/input/data/train", "network_isolation=true; params.data=s3://b/train", "params={data: ['s3://b/x', here]}"],
    "tracking.mlflow.uri": ["tracking.mlflow.uri=sqlite:///x.db", "tracking.mlflow.uri=arn:aws:sagemaker:us-east-1:123456789012:model/x"],
    # what everyone may read
    "environment.HF_TOKEN": ["environment={HF_TOKEN: abc}"],
    "environment.ID": ["environment={ID: AKIAABCDEFGHIJKLMNOP}"],
    "environment.PIP_INDEX_URL": ["environment={PIP_INDEX_URL: 'https://me:secret@host/packages'}"],
    "environment.RAY_AUTH_MODE": ["environment={RAY_AUTH_MODE: disabled}"],
    "environment.MY-NAME": ["environment={MY-NAME: x}"],
    "environment.LONG": [f"environment={{LONG: {'x' * 513}}}"],
    "hyperparameters.wandb_api_key": ["hyperparameters={wandb_api_key: x}"],
    "train.epoch": ["hyperparameters={train.epoch: 3}"],
    "train.epochs": ["hyperparameters={train.epochs: 0}"],
    "hyperparameters.sagemaker_program": ["hyperparameters={sagemaker_program: x.py}"],
    "hyperparameters.params.title": ['hyperparameters={params.title: "it\'s"}'],
    "hyperparameters.params.words": [f"hyperparameters={{params.words: {'x' * 2501}}}"],
    "hyperparameters": [f"hyperparameters={many('params.pN: 1', 100)}"],
    "tags": [f"tags={many('tN: x', 50)}"],
    "role": ["role=null", "role=StokerJob"],
    "region": ["region=us-east-9", "region=null"],
    "s3_uri": ["s3_uri=null", "s3_uri=my-bucket/x"],
},
"vertex": {
    "gpu.machine_type": [NO_POOL],
    "pools": [
        "pools=[{name: x, machine_type: c2-standard-8}]",
        pools("gpu g2-standard-8", "gpu a2-highgpu-1g"),
    ],
    "": [f"{N1}; gpu.accelerator=NVIDIA_TESLA_T5"],
    "cluster.gpu_group": [pools("a g2-standard-8", "b a2-highgpu-1g"), "cluster.gpu_group=gpus"],
    "train.workers": ["train.workers=3"],
    "cluster.min_cpu_hosts": ["cluster.min_cpu_hosts=3"],
    "data.preprocess_on": ["data.preprocess_on=[feeders]"],
    "checkpoint.dir": ["checkpoint.dir=ckpt"],
    "project": ["project=null"],
    "gcs_uri": ["gcs_uri=null", "gcs_uri=s3://my-bucket/x", "gcs_uri=gs://my-bucket/a b"],
    "environment.AIP_MODEL_DIR": ["environment={AIP_MODEL_DIR: x}"],
    "environment.CLUSTER_SPEC": ["environment={CLUSTER_SPEC: x}"],
    "environment.HF_TOKEN": ["environment={HF_TOKEN: hf_abcdefghijklmnopqrstuvwxyz012345}"],
    "params.data": ["params.data=/data/flowers"],
    "image": ["image=null"],
},
}  # fmt: skip
"""By place and key, changes of a job that can be planned, each of which makes it wrong."""

BEYOND = """
    seed=x output_dir= train.batch_size=0 train.batch_size=1.5 train.workers=0 train.workers=auto
    train.scheduler=consine train.warmup_epochs=-1 train.label_smoothing=1.0 train.mixup=-0.1
    train.accumulate_steps=0 train.clip_grad_norm=0 train.max_steps=0 data.block_records=0 data.prefetch_s=-1
    data.cache=ram data.cache_gb=0 data.cache_share=1.5 data.transport=rdma data.stall_timeout_s=0
    data.remainder=-1 cluster.port=80 cluster.cpus=0 cluster.min_cpu_hosts=-2 checkpoint.keep=0
    checkpoint.every_steps=0 checkpoint.dir= checkpoint.mode=lower tracking.log_every_steps=0
    vertex.boot_disk_gb=5 slurm.gpu.nodes=0 slurm.cpu.nodes=-1 slurm.max_runtime_s=-5 slurm.max_runtime_s=4h
    slurm.stop_before_s=-1 slurm.gpu.gpus=-1
    recipe= data.prepare= data.bucket_by= train.optimizer= train.early_stopping.monitor= cluster.gpu_group=
    checkpoint.monitor= sagemaker.gpu.type= sagemaker.region= sagemaker.role= sagemaker.image=
    sagemaker.kms_key= sagemaker.volume_kms_key= vertex.gpu.machine_type= vertex.kms_key= vertex.image=
    rehearsal.hosts= slurm.account= slurm.gpu.partition= slurm.gpu.qos= slurm.gpu.gpu_type=
"""


@pytest.mark.parametrize("word", BEYOND.split())
def test_a_value_beyond_the_bounds_of_its_key_is_refused_by_the_keys_name(word: str) -> None:
    with refused_by(word.partition("=")[0], code=2):
        load(None, [word])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with jobs and scripts, where a command is typed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "prices", raising=False)
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    for variable in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "CLOUDSDK_CONFIG"):
        monkeypatch.setenv(variable, str(tmp_path / "none"))
    for name, content in {
        "job.yaml": "seed: 1\n",
        "jobs/job.yaml": GOOD,
        "remote.yaml": "output_dir: /shared\nparams: {data: s3://b/x}\n",
        "slurm.yaml": f"{GOOD}output_dir: /shared\n",
        "nothing.yaml": "",
        "flowers.yaml": "seed: 1\n",
        "fine.py": "",
        "train.py": "",
        "broken.py": "def f(:\n",
        "prices.py": "from stoker.recipe import Recipe\nclass Prices(Recipe): ...\n",
        "unclosed.py": "def broken(:\n",
        "needy.py": "import timmm\n",
    }.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    Path("empty").mkdir()
    return tmp_path


def refused(words: list[str], said: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files_in(here)
    code, lines, _ = type_command(words, capsys)
    assert (code, len(lines)) == (2, 1), lines
    assert said in lines[0]
    assert files_in(here) == before


def files_in(folder: Path) -> list[Path]:
    """All but the bytecode of the recipes that Python imports."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize(("words", "said"), COMMANDS, ids=[words for words, _ in COMMANDS])
def test_a_wrong_command_is_one_line_and_leaves_nothing(
    words: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(shlex.split(words), said, here, capsys)


@pytest.mark.parametrize(
    ("text", "said"),
    [*FILES, *(pytest.param(*row, marks=pytest.mark.long) for row in LARGE.items())],
    ids=[*(text for text, _ in FILES), *map(str, range(len(LARGE)))],
)
def test_a_wrong_file_is_one_line_and_leaves_nothing(
    text: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    escapes = text.replace(r"\n", "\n").replace(r"\t", "\t")
    Path("job.yaml").write_text(escapes)
    refused(["job.yaml", "--dry-run"], said, here, capsys)


@pytest.mark.long
@pytest.mark.parametrize(("place", "key"), [(on, key) for on in CLOUDS for key in CLOUDS[on]])
def test_a_job_that_a_cloud_would_fail_is_refused_by_its_key(
    place: str, key: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.yaml").write_text("recipe: needy:Prices\n")
    for changes in CLOUDS[place][key]:
        words = [*WORDS[place], *words_of(changes_of(changes, place))]
        typed = ["job.yaml", *words, "--on", place, "--offline", "--dry-run"]
        code, lines, _ = type_command(typed, capsys)
        found = [line for line in lines if line.startswith("error: ")]
        assert code == 2, changes
        assert any(f"{full(key, place).rstrip('.')}: " in line for line in found), found
        assert all(len(line) < 500 for line in found), found
        assert len(found) <= 2, f"one mistake, many complaints: {found}"


MISSING = {
    "sagemaker": {"sagemaker.region", "sagemaker.gpu.type", "sagemaker.role"},
    "vertex": {"vertex.project", "vertex.gcs_uri", "vertex.image", "vertex.gpu.machine_type"},
}


@pytest.mark.parametrize("place", MISSING)
def test_the_first_refusal_names_all_that_is_missing(
    place: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("job.yaml").write_text(GOOD)
    Path("rows.py").write_text(ROWS)
    _, lines, _ = type_command(["job.yaml", "--on", place, "--offline", "--dry-run"], capsys)
    assert {line.split(": ")[1] for line in lines} >= MISSING[place]


def test_all_errors_come_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text("trian: 1\ntrain: {epochs: 0, lr: x}\n")
    assert len(type_command(["job.yaml", "data.order=no"], capsys)[1]) == 4
    wrong = ["slurm.gpu.extra=[--qos=x]", "slurm.max_runtime_s=1", "output_dir=runs"]
    assert len(type_command(["slurm.yaml", *wrong, "--on", "slurm"], capsys)[1]) == 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_fails_while_the_source_is_staged_leaves_no_run(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/old").mkdir(parents=True)
    Path("runs/latest").symlink_to("old")
    Path("job.yaml").write_text(GOOD)
    failure = OSError(number, os.strerror(number), "x")
    with mock.patch("shutil.copytree", side_effect=shutil.Error([("a", "b", str(failure))])):
        code, lines, _ = type_command(["job.yaml"], capsys)
    assert (
        (code, len(lines)) == (2, 1)
        and os.strerror(number) in lines[0]
        and "cannot be written" in lines[0]
    )
    with mock.patch("shutil.copytree", side_effect=failure):
        code, lines, _ = type_command(["job.yaml"], capsys)
    assert (code, len(lines)) == (2, 1) and os.strerror(number) in lines[0]
    assert {path.name for path in Path("runs").iterdir()} == {"old", "latest"}
    assert str(Path("runs/latest").readlink()) == "old"


LONG = "word " * 100


def test_a_text_too_long_for_a_path_is_no_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_FOLDERS", "/" + LONG)
    Path("job.yaml").write_text(GOOD)
    Path("rows.py").write_text(ROWS)
    words = ["job.yaml", f"tracking.mlflow.tags={{note: {LONG}}}", "--dry-run"]
    assert type_command(words, capsys)[:2] == (0, [])
    assert open_job(load(None, [f"params.prompt={LONG}"])).data == {}
    planned = plan(
        f"{{name: made, recipe: 'rows:Counting', tracking: {{mlflow: {{tags: {{n: {LONG}}}}}}}}}",
        (),
        "local",
    )
    assert planned.job.name == "made"
    for words in (
        [f"params.prompt={LONG}"],
        ["x" * 300],
        ["status", LONG],
        ["job.yaml", "--resume", LONG],
    ):
        code, lines, _ = type_command(words, capsys)
        assert (code, len(lines)) == (2, 1), lines


def test_a_staging_folder_that_is_full_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(GOOD)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/staged")
    with mock.patch("stoker_launcher.commands.run", side_effect=full):
        code, lines, _ = type_command(["job.yaml"], capsys)
    assert code == 2
    assert lines == [
        "error: /tmp/staged: No space left on device; free up space, shorten a name or choose another folder"
        " (output_dir=…, TMPDIR)"
    ]
