"""lerobot-train with the ACT policy on a small recorded dataset."""

import sys

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.scripts import lerobot_train

features = {
    "observation.state": {"dtype": "float32", "shape": (4,), "names": None},
    "action": {"dtype": "float32", "shape": (4,), "names": None},
    "observation.images.top": {
        "dtype": "image",
        "shape": (64, 64, 3),
        "names": ["height", "width", "channels"],
    },
}
recorded = LeRobotDataset.create("tiny/reach", 10, features, root="recorded", use_videos=False)
generator = np.random.default_rng(0)
for _episode in range(3):
    for _frame in range(12):
        recorded.add_frame(
            {
                "observation.state": generator.normal(size=4).astype(np.float32),
                "action": generator.normal(size=4).astype(np.float32),
                "observation.images.top": generator.integers(0, 255, (64, 64, 3), dtype=np.uint8),
                "task": "reach",
            }
        )
    recorded.save_episode()
recorded.finalize()


def shown(*arguments, _update=lerobot_train.update_policy, **options):
    tracker, output = _update(*arguments, **options)
    print("loss", tracker.loss.val, tracker.grad_norm.val, output)
    return tracker, output


lerobot_train.update_policy = shown
sys.argv[1:] = [
    "--dataset.repo_id=tiny/reach",
    "--dataset.root=recorded",
    "--policy.type=act",
    "--policy.device=cpu",
    "--policy.push_to_hub=false",
    "--policy.pretrained_backbone_weights=null",
    "--policy.dim_model=32",
    "--policy.n_heads=2",
    "--policy.dim_feedforward=32",
    "--policy.n_encoder_layers=1",
    "--policy.n_vae_encoder_layers=1",
    "--policy.latent_dim=8",
    "--policy.chunk_size=8",
    "--policy.n_action_steps=8",
    "--batch_size=4",
    "--num_workers=2",
    "--steps=14",
    "--eval_freq=0",
    "--log_freq=100",
    "--save_checkpoint=false",
    "--output_dir=trained",
    "--wandb.enable=false",
]
lerobot_train.main()
