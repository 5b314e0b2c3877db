"""What timm's train.py does: create_loader with its prefetcher and a loader that lives for all epochs."""

import timm
import torch
from PIL import Image
from timm.data import create_loader
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2

colours = torch.randint(0, 255, (40, 3), generator=torch.Generator().manual_seed(1)).tolist()


class Pictures(torch.utils.data.Dataset):
    transform = target_transform = None

    def __len__(self):
        return len(colours)

    def __getitem__(self, index):
        picture = Image.new("RGB", (40 + index % 5, 36), tuple(colours[index]))
        return self.transform(picture), index % 4


torch.manual_seed(0)
model = timm.create_model("test_resnet", num_classes=4, in_chans=3)
optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9)
how = {"input_size": (3, 32, 32), "batch_size": 8, "num_workers": 2, "device": torch.device("cpu")}
training = create_loader(
    Pictures(), is_training=True, no_aug=True, use_multi_epochs_loader=True, **how
)
validation = create_loader(Pictures(), is_training=False, use_multi_epochs_loader=True, **how)
loss_of = LabelSmoothingCrossEntropy()
for _epoch in range(3):
    model.train()
    for pictures, labels in training:
        loss = loss_of(model(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", loss.item())
    model.eval()
    with torch.no_grad():
        for pictures, labels in validation:
            print("loss", loss_of(model(pictures), labels).item())
