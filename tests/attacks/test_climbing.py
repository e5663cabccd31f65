import dataclasses

import torch
from torch import nn

from patchcert.attacks import AttackedModel
from patchcert.attacks.climbing import Climbers, Record, segments_of
from patchcert.attacks.views import View, put, stamp_cells
from patchcert.threats import Patch


@dataclasses.dataclass(frozen=True, eq=False)
class Boaster(View):
    """Sees every image broken."""

    is_exact = False

    cells: torch.Tensor

    def logits(self, values):
        return torch.tensor([[0.0, 9.0]]).repeat(len(values), 1) + 0 * values.sum(dim=1, keepdim=True)

    def keep(self, index):
        return Boaster(self.cells[index])


def test_the_model_itself_is_asked_before_anything_is_recorded():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[0.0, 0, 0, 0], [1.0, 1, 1, 1]]))
        model[1].bias.copy_(torch.tensor([2.5, 0.0]))
    images, labels = torch.zeros(2, 1, 2, 2), torch.tensor([0, 0])
    record = Record(AttackedModel.of(model), images, labels)
    owner = torch.tensor([0, 1])
    cells = stamp_cells(Patch((1, 2)), torch.tensor([[0, 0], [1, 0]]), images.shape[1:])
    climbers = Climbers.at(owner, owner, Boaster(cells), torch.ones(2, 2))
    climbers = record.update(dataclasses.replace(climbers, lead=torch.tensor([9.0, 9.0])))
    torch.testing.assert_close(record.lead, torch.tensor([-0.5, -0.5]), atol=1e-4, rtol=0)
    assert torch.equal(climbers.lead, record.lead)
    assert torch.equal(record.images, put(images, cells, torch.ones(2, 2)))
    assert (record.lead <= 0).all()


def test_segments_add_up_to_all_steps():
    assert segments_of(12, 5) == [5, 5, 2]
    assert segments_of(10, 5) == [5, 5]
    assert segments_of(0, 5) == []
