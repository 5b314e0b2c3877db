"""torchvision's detection reference: pictures and targets of unequal sizes, batches of one aspect ratio each."""

from collections import defaultdict

import torch
import torchvision
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler
from torchvision import tv_tensors
from torchvision.transforms import v2


class Scenes(Dataset):
    transforms = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.ToDtype(torch.float, scale=True)])

    def __len__(self):
        return 22

    def get_height_and_width(self, index):
        return (48, 64 + index) if index % 3 else (70 + index, 48)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        size = self.get_height_and_width(index)
        corners = torch.randint(0, 20, (index % 4 + 1, 2), generator=generator)
        boxes = torch.cat([corners, corners + torch.randint(5, 25, (1,), generator=generator)], 1)
        target = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size),
            "labels": torch.randint(1, 3, (len(boxes),), generator=generator),
            "image_id": index,
        }
        picture = torch.randint(0, 255, (3, *size), dtype=torch.uint8, generator=generator)
        return self.transforms(tv_tensors.Image(picture), target)


class GroupedBatchSampler(BatchSampler):
    """Batches of one group each; a group's last batch is filled with its first members."""

    def __init__(self, sampler, groups, batch_size):
        self.sampler, self.groups, self.batch_size = sampler, groups, batch_size

    def __len__(self):
        return len(self.sampler) // self.batch_size

    def __iter__(self):
        waiting, seen, given = defaultdict(list), defaultdict(list), 0
        for index in self.sampler:
            group = self.groups[index]
            waiting[group].append(index)
            seen[group].append(index)
            if len(waiting[group]) == self.batch_size:
                yield waiting.pop(group)
                given += 1
        for group, left in sorted(waiting.items(), key=lambda each: -len(each[1])):
            if given < len(self):
                given += 1
                yield (left + seen[group])[: self.batch_size]


def collate(batch):
    return tuple(zip(*batch, strict=True))


scenes = Scenes()
groups = [int(height > width) for height, width in map(scenes.get_height_and_width, range(22))]
batches = GroupedBatchSampler(RandomSampler(scenes), groups, 4)
loader = DataLoader(scenes, batch_sampler=batches, num_workers=2, collate_fn=collate)
torch.manual_seed(0)
model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
    weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=96
)
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
for _epoch in range(2):
    for pictures, targets in loader:
        targets = [{**each, "boxes": each["boxes"].float()} for each in targets]
        losses = model(list(pictures), targets)
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", *[each.item() for each in losses.values()])
        print("batch", [each["image_id"] for each in targets], type(targets[0]["boxes"]).__name__)
