// Predict on images with model.aoti.pt2, without Python: ./classify model.aoti.pt2 labels.txt image.ppm ...
//
// Images are PPM or PGM, upright, with 8 bits, or with 16 for a model of such images: what
// `Preprocessing.read_image` of preprocess.py gives. Of a JPEG that was decoded at a part of its size, append
// the full one: image.ppm=3024x4032.
//
// Build, with the folder of an installed torch (a CPU build is enough) as $TORCH:
//   g++ -std=c++20 -O2 classify.cpp -o classify -I$TORCH/include -I$TORCH/include/torch/csrc/api/include
//       -L$TORCH/lib -Wl,-rpath,$TORCH/lib -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

static const bool of_16_bits = false; // the model takes levels 0 .. 65535 as float32
enum Task { CLASSES, LABELS, NUMBERS, MASKS };
static const Task task = CLASSES;
static const std::vector<double> thresholds{}; // of labels: the probability from which on each is predicted
static const std::vector<int64_t> values{}; // of masks: the number of each class

// (1, H, W, C) uint8, or float32 levels, of a binary PGM or PPM.
static torch::Tensor read_pixels(const std::string &name) {
    std::ifstream file(name, std::ios::binary);
    if (!file) throw std::runtime_error(name + " cannot be read");
    auto word = [&] {
        std::string text;
        while (file >> text && text[0] == '#') file.ignore(1 << 20, '\n');
        return text;
    };
    const std::string magic = word();
    const int64_t channels = magic == "P5" ? 1 : magic == "P6" ? 3 : 0;
    if (!channels) throw std::runtime_error(name + " is no binary PGM or PPM");
    const int64_t width = std::stoll(word()), height = std::stoll(word());
    if (word() != (of_16_bits ? "65535" : "255") || width < 1 || height < 1 || width > 65535 || height > 65535)
        throw std::runtime_error(name + (of_16_bits ? " has not 16 bits" : " has not 8 bits") + ", or an impossible size");
    file.get(); // the one white space before the pixels
    const int64_t depth = of_16_bits ? 2 : 1;
    auto bytes = torch::empty({1, height, width, channels, depth}, torch::kUInt8);
    if (!file.read(static_cast<char *>(bytes.data_ptr()), bytes.numel()))
        throw std::runtime_error(name + " is cut short");
    if (!of_16_bits) return bytes.squeeze(-1);
    return bytes.select(-1, 0).to(torch::kFloat) * 256 + bytes.select(-1, 1); // the high byte comes first
}

int main(int count, char **words) try {
    if (count < 4) throw std::runtime_error("usage: classify model.aoti.pt2 labels.txt image.ppm[=HEIGHTxWIDTH] ...");
    std::vector<std::string> labels;
    std::ifstream lines(words[2]);
    for (std::string line; std::getline(lines, line);) labels.push_back(line);
    torch::inductor::AOTIModelPackageLoader model(words[1]);
    c10::InferenceMode inference;
    for (int k = 3; k < count; k++) {
        std::string name = words[k];
        long long height = 0, width = 0;
        const auto equals = name.rfind('=');
        if (equals != std::string::npos &&
            std::sscanf(name.c_str() + equals, "=%lldx%lld", &height, &width) == 2)
            name.resize(equals);
        const auto pixels = read_pixels(name);
        if (!height) height = pixels.size(1), width = pixels.size(2);
        std::vector<torch::Tensor> inputs{pixels, torch::tensor({(int64_t)height, (int64_t)width})};
        auto answer = model.run(inputs)[1][0];
        if (task == MASKS) { // the share of each class in the mask (H, W)
            const auto counts = torch::bincount(answer.flatten(), {}, 256).to(torch::kDouble) / answer.numel();
            answer = counts.index({torch::tensor(values)});
        }
        const int64_t best = answer.argmax().item<int64_t>();
        std::string text;
        for (int64_t at = 0; at < answer.size(0); at++) {
            const double value = answer[at].item<double>();
            if (task == CLASSES ? at != best : task == LABELS ? value < thresholds.at(at) : task == MASKS && !value) continue;
            char number[64];
            std::snprintf(number, sizeof number, task == NUMBERS ? "%.6g" : "%.6f", value);
            text += (text.empty() ? "" : ", ") + labels.at(at) + " " + number;
        }
        std::printf("%s: %s\n", name.c_str(), text.empty() ? "no label" : text.c_str());
    }
    return 0;
} catch (const std::exception &error) {
    std::cerr << "classify: " << error.what() << "\n";
    return 2;
}
