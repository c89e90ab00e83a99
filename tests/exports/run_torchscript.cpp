// Runs a TorchScript file on tensors that another one holds, and saves what it returns.
#include <torch/script.h>

#include <fstream>
#include <iostream>

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: run_torchscript MODEL INPUTS OUTPUT\n";
    return 2;
  }
  torch::NoGradGuard no_grad;
  auto model = torch::jit::load(argv[1]);
  auto held = torch::jit::load(argv[2]);
  std::vector<torch::jit::IValue> inputs;
  for (const auto& buffer : held.buffers()) {
    inputs.emplace_back(buffer);
  }
  auto result = model.forward(inputs);
  auto output = result.isTuple() ? result.toTuple()->elements()[0].toTensor() : result.toTensor();
  auto bytes = torch::jit::pickle_save(output.cpu().contiguous());
  std::ofstream(argv[3], std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return 0;
}
