"""How many digits of an energy and of a force are real? CHGNet on four crystals."""

# %% [markdown]
# # How many digits of an energy and of a force are real?
#
# CHGNet predicts the energy of a crystal and, as its derivative, the forces on the atoms. Its weights are in the
# package (`pip install --no-deps chgnet`), whose other requirements read structures from files and are not needed
# here: a crystal is made below. The atoms of four crystals are moved by 0.05 Å at random, so that there are forces.

# %%
from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from copy import deepcopy
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor, nn

import fxround
from benchmarks.harness import table
from fxround import Policy, Rule


class Crystal:
    """What CHGNet asks of a structure of pymatgen: atomic numbers, rows of a lattice in Å, and fractional positions."""

    def __init__(self, numbers: list[int], lattice: np.ndarray, fractional: np.ndarray) -> None:
        self.lattice = types.SimpleNamespace(matrix=lattice)
        self.frac_coords = fractional
        self.sites = [types.SimpleNamespace(specie=types.SimpleNamespace(Z=number)) for number in numbers]
        self.composition = types.SimpleNamespace(formula="")

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[types.SimpleNamespace]:
        return iter(self.sites)

    def get_neighbor_list(self, r: float, sites: object, numerical_tol: float) -> tuple[np.ndarray, ...]:
        """Return centers, neighbours, images of the cell and distances of all pairs that are at most r Å apart."""
        lattice = self.lattice.matrix
        reach = np.ceil(r * np.linalg.norm(np.linalg.inv(lattice), axis=0)).astype(int) + 1
        images = np.array(list(np.ndindex(*(2 * reach + 1)))) - reach
        positions = self.frac_coords @ lattice
        apart = positions[None, :, None] + images @ lattice - positions[:, None, None]
        distances = np.linalg.norm(apart, axis=-1)
        centers, neighbours, which = np.nonzero((distances <= r) & (distances > numerical_tol))
        return centers, neighbours, images[which], distances[centers, neighbours, which]


# The model without what reads files, counts GPUs and moves atoms.
package = find_spec("chgnet")
assert package is not None and package.submodule_search_locations
SUBSTITUTES = {
    "pymatgen": {},
    "pymatgen.core": {"Structure": Crystal},
    "chgnet.utils": {"write_json": None, "determine_device": lambda **_: "cpu"},
    "chgnet.model": {"__path__": [f"{package.submodule_search_locations[0]}/model"]},
}
for name, attributes in SUBSTITUTES.items():
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(attributes)
from chgnet.model import layers  # noqa: E402
from chgnet.model.model import CHGNet  # noqa: E402

# Whoever asks for pymatgen after this study does not get a class without its methods.
for name in ("pymatgen", "pymatgen.core"):
    del sys.modules[name]

network = CHGNet.load(verbose=False).eval()
draws = np.random.default_rng(0)
FACES = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
PEROVSKITE = np.array([[0, 0, 0], [0.5, 0.5, 0.5], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]])


def moved(numbers: list[int], edge: float, fractional: np.ndarray) -> Crystal:
    """Return a cubic crystal, its edge in Å, whose atoms are moved by a deviation of 0.05 Å in each direction."""
    return Crystal(numbers, edge * np.eye(3), fractional + draws.normal(0, 0.05 / edge, fractional.shape))


crystals = {
    "Si": moved([14] * 8, 5.431, np.concatenate([FACES, FACES + 0.25])),
    "Cu": moved([29] * 4, 3.615, FACES),
    "NaCl": moved([11] * 4 + [17] * 4, 5.64, np.concatenate([FACES, FACES + 0.5])),
    "SrTiO3": moved([38, 22, 8, 8, 8], 3.905, PEROVSKITE),
}

# %% [markdown]
# CHGNet counts atoms and bonds at each call. Here they are fixed, and positions are the argument: the same layers in
# the same order give the same bits, which is checked.


# %%
def total(data: Tensor, owners: Tensor, *, average: bool, num_owner: int = 1) -> Tensor:
    """Return the sums of the rows of each owner [num_owner, columns]."""
    assert not average
    return data.new_zeros(num_owner, data.shape[1]).index_add(0, owners, data)


class Potential(nn.Module):
    """Positions [n, 3] in Å to the energy [1] in eV per atom and the forces [n, 3] in eV/Å.

    graph: of CHGNet's converter. scale: a power of 2 by which the energy is multiplied before it is differentiated, and
    the derivative divided after it.
    """

    def __init__(self, graph: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.network, self.scale = network, scale
        self.register_buffer("atoms", graph.atomic_number - 1)
        self.register_buffer("lattice", graph.lattice.detach())
        for name in ("atom_graph", "bond_graph", "neighbor_image", "directed2undirected", "undirected2directed"):
            self.register_buffer(name, getattr(graph, name))
        with torch.no_grad():
            self.register_buffer("of_atoms", network.composition_model([graph]))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        net, bonded, pairs = self.network, self.atom_graph, self.directed2undirected
        near, nearer, directions = net.bond_basis_expansion(
            center=positions[bonded[:, 0]],
            neighbor=positions[bonded[:, 1]],
            undirected2directed=self.undirected2directed,
            image=self.neighbor_image,
            lattice=self.lattice,
        )
        of_angle = self.bond_graph[:, [0, 1, 3]]
        corners = (directions[self.bond_graph[:, 2]], directions[self.bond_graph[:, 4]])
        atoms, bonds = net.atom_embedding(self.atoms), net.bond_embedding(near)
        angles = net.angle_embedding(net.angle_basis_expansion(*corners))
        of_near, of_nearer = net.bond_weights_ag(near), net.bond_weights_bg(nearer)
        for layer, of_bonds, of_angles in zip(
            net.atom_conv_layers, net.bond_conv_layers, net.angle_layers, strict=False
        ):
            atoms = layer(atoms, bonds, of_near, bonded, pairs)
            bonds = of_bonds(atoms, bonds, of_nearer, angles, of_angle)
            angles = of_angles(atoms, bonds, angles, of_angle)
        atoms = net.atom_conv_layers[-1](atoms, bonds, of_near, bonded, pairs)
        energy = net.mlp(net.readout_norm(atoms)).sum()
        (slope,) = torch.autograd.grad(self.scale * energy, positions, create_graph=True)
        return energy / len(positions) + self.of_atoms, -slope / self.scale


studies = {}
graphs = {name: network.graph_converter(crystal) for name, crystal in crystals.items()}
originals = {name: network.predict_graph(graph, task="ef") for name, graph in graphs.items()}
layers.aggregate = total
for name, graph in graphs.items():
    potential, positions = Potential(graph).eval(), (graph.atom_frac_coord @ graph.lattice).detach()
    energy, forces = (result.detach() for result in potential(positions.requires_grad_()))
    own = originals[name]
    assert float(energy) == own["e"] and (forces.numpy() == own["f"]).all(), f"{name}: CHGNet gives other bits"
    wide = positions.detach().double().requires_grad_()
    energy, forces = (result.detach() for result in deepcopy(potential).double()(wide))
    studies[name] = potential, positions, torch.cat([energy.expand(1, 3), forces])
    strength = float(forces.square().mean().sqrt())
    print(f"{name}: {float(energy):.3f} eV per atom, forces of {strength:.2f} eV/Å", flush=True)

# %% [markdown]
# The model in binary64 is the reference. Products are those of the layers, or all: the position of a neighbour in
# another cell is the product of the cell's number and the lattice, which a format for products rounds, too. Derivatives
# of the energy may be less than binary16's least number, so that it is tried on 1,024 times the energy, too.

# %%
FLOAT32 = Rule(rounding="dtype/nearest_even")
GEOMETRY = Rule("network.bond_basis_expansion", operator="contraction", operands="identity")
FORMATS = {
    "tf32": "tf32",
    "binary16": "binary16",
    "bfloat16": "bfloat16",
    "fp8": "scaled(e4m3fn;tensor,binary32,inverse)",
}
policies: dict[str, str | Policy] = {"float32": "reproducible"}
for name, operands in FORMATS.items():
    products = Rule(operator="contraction", operands=operands)
    policies[f"{name}, products of layers"] = Policy(f"{name} layers", (FLOAT32, products, GEOMETRY))
    if name in ("tf32", "bfloat16"):
        policies[f"{name}, all products"] = Policy(f"{name} products", (FLOAT32, products))
policies |= {"binary16, every value": "binary16", "bfloat16, every value": "bfloat16"}
HALF = "binary16, products of layers"
SCALED = f"{HALF}, 1024 E"


def energy_off(result: tuple[Tensor, Tensor], target: Tensor) -> float:
    """Return the error of the energy in meV per atom. target: the energy, and the forces, [1 + n, 3]."""
    return 1000 * float((result[0] - target[0, :1]).abs())


def force_off(result: tuple[Tensor, Tensor], target: Tensor) -> float:
    """Return the largest error of a component of a force in meV/Å."""
    return 1000 * float((result[1] - target[1:]).abs().max())


# %%
columns = ("values", "bits of the energy", "bits of a force", "energy off by, meV/atom", "force off by, meV/Å")
rows, worst = [], {name: np.zeros(2) for name in (*policies, SCALED)}
for name, (potential, positions, exact) in studies.items():
    batch = [((positions,), {}, exact)]
    report = fxround.variability(potential, (positions,), samples=10, metrics=(), reference=None)
    bits = [f"{figures.bits:.1f}" for figures in report.outputs]
    compared = fxround.compare(potential, batch, policies, [energy_off, force_off], samples=1)
    scaled = fxround.compare(
        Potential(graphs[name], 1024.0).eval(), batch, {SCALED: policies[HALF]}, [energy_off, force_off], samples=1
    )
    results = [*compared.policies, *scaled.policies]
    off = {row.name: tuple(metric.mean for metric in row.metrics) for row in results}
    rows.append([f"float32, {name}", *bits, *(f"{error:.2g}" for error in off.pop("float32"))])
    for policy, errors in off.items():
        # Unlike max, NumPy's maximum keeps a NaN.
        worst[policy] = np.maximum(worst[policy], errors)
        print(name, policy, *(f"{error:.2g}" for error in errors), flush=True)
    print(rows[-1], flush=True)
worst.pop("float32")
rows += [[name, "", "", *(f"{error:.2g}" for error in errors)] for name, errors in worst.items()]
print(table(columns, rows))
