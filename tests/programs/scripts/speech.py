"""Lhotse: cuts of unequal length, batched by duration in the loop's process, read in the loader's."""

import numpy as np
import soundfile
import torch
from lhotse import CutSet, Fbank, MonoCut, Recording
from lhotse.dataset import DynamicBucketingSampler, K2SpeechRecognitionDataset, OnTheFlyFeatures
from lhotse.supervision import SupervisionSegment
from torch.utils.data import DataLoader

cuts = []
for number in range(40):
    seconds = 0.4 + number % 7 * 0.1
    sound = np.random.default_rng(number).normal(0, 0.1, int(seconds * 16_000))
    soundfile.write(f"{number}.wav", sound, 16_000)
    recording = Recording.from_file(f"{number}.wav", recording_id=f"recording-{number}")
    text = SupervisionSegment(
        id=f"text-{number}",
        recording_id=recording.id,
        start=0,
        duration=recording.duration,
        text="a b " * (number % 5 + 1),
    )
    cuts.append(
        MonoCut(
            id=f"cut-{number}",
            start=0,
            duration=recording.duration,
            channel=0,
            supervisions=[text],
            recording=recording,
        )
    )
dataset = K2SpeechRecognitionDataset(input_strategy=OnTheFlyFeatures(Fbank()))
sampler = DynamicBucketingSampler(
    CutSet.from_cuts(cuts), max_duration=4.0, num_buckets=3, shuffle=True, seed=1
)
loader = DataLoader(dataset, sampler=sampler, batch_size=None, num_workers=2)
torch.manual_seed(0)
model = torch.nn.Linear(80, 6)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        labels = torch.tensor([len(text.split()) % 6 for text in batch["supervisions"]["text"]])
        loss = torch.nn.functional.cross_entropy(model(batch["inputs"].mean(1)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", loss.item(), *batch["inputs"].shape)
