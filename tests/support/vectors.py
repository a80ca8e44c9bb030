"""Vectors for tests of selections and compressors, and an oracle for the k largest entries."""

import torch

from lightning_sparse.compressors import TopK


def oracle(u: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k largest entries by sorting the bits without the sign, with the lowest index first among equals."""
    magnitudes = u.view(torch.int32) & 0x7FFFFFFF
    return magnitudes.sort(descending=True, stable=True).indices[:k].sort().values


def flat(module: torch.nn.Module, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a module's parameters as one vector."""
    return torch.cat([param.detach().to(dtype=dtype).flatten() for param in module.parameters()])


def clustered(u):
    u[: len(u) // 50] *= 100
    return u


def broken(u):
    u[::701] = torch.nan
    u[5::997] = -torch.inf
    return u


INPUTS = {
    "normal": lambda d: torch.randn(d),
    "heavy tails": lambda d: torch.randn(d) ** 5,
    "layers": lambda d: torch.randn(d) * torch.logspace(-8, 2, d),
    "bf16": lambda d: torch.randn(d).bfloat16().float(),
    "few values": lambda d: torch.randn(d).mul(2).round(),
    "signs": lambda d: torch.randn(d).sign(),
    "constant": lambda d: torch.full((d,), -2.0),
    "zeros": torch.zeros,
    "negative zeros": lambda d: -torch.zeros(d),
    "mostly zero": lambda d: torch.randn(d) * (torch.rand(d) < 0.0007),
    "clustered": lambda d: clustered(torch.randn(d)),
    "ascending": lambda d: torch.arange(d, dtype=torch.float32),
    "denormal": lambda d: torch.randn(d) * 1e-41,
    "nan and inf": lambda d: broken(torch.randn(d)),
    "all nan": lambda d: torch.full((d,), torch.nan),
}


def laplace(numel):
    return torch.empty(numel).exponential_() * torch.randn(numel).sign()


def student(numel, freedom):
    return torch.randn(numel) / (torch.randn(freedom, numel).square_().mean(0)).sqrt_()


SMOOTH = {
    "Gaussian": torch.randn,
    "Laplace": laplace,
    "Student 3": lambda d: student(d, 3),
    "Student 5": lambda d: student(d, 5),
    "shifted up": lambda d: torch.randn(d) + 3,
    "shifted down": lambda d: laplace(d) - 30,
    "mixed scales": lambda d: torch.randn(d) * torch.logspace(-6, 0, d),
    "small": lambda d: laplace(d) * 1e-15,
    "large": lambda d: laplace(d) * 1e15,
}
DENSITIES = [0.001, 0.005, 0.01, 0.05]


def recorded(density: float, steps: int = 12) -> list[torch.Tensor]:
    """Return u = g + e of error feedback in each step, while an MLP learns real digits with TopK at this density."""
    from sklearn.datasets import load_digits  # imported here, because GPU machines that test kernels may lack it

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    net = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 10))
    residual = torch.zeros(sum(param.numel() for param in net.parameters()))
    seen = []
    for step in range(steps):
        batch = slice(64 * step, 64 * (step + 1))
        net.zero_grad()
        torch.nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
        residual += torch.cat([param.grad.flatten() for param in net.parameters()])
        seen.append(residual.clone())
        sent = torch.zeros_like(residual)
        chosen = TopK(density).select(residual)
        sent[chosen] = residual[chosen]
        residual[chosen] = 0
        torch.nn.utils.vector_to_parameters(
            torch.nn.utils.parameters_to_vector(net.parameters()).detach() - 0.5 * sent, net.parameters()
        )
    return seen
