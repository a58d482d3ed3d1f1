// SPDX-License-Identifier: Apache-2.0
// Hostile problems, tensors and numbers to the C API, of which each is run or refused with a message.
//
//   convpool_fuzz_c_api SEED ROUNDS
//
// The sanitizers look on, and a pretended CUDA runtime takes the launches.  A failure prints the seed of its round, which alone
// repeats it: convpool_fuzz_c_api SEED 1.
#include <convpool.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

extern "C" void pretended_set_device(int device, uint64_t context);

namespace {

void expect(bool right, const std::string &what) {
    if (!right) throw std::runtime_error(what);
}

// A status of the enum, with a message unless it is CONVPOOL_OK.
bool ok(convpool_status status, const char *function) {
    expect(status >= CONVPOOL_OK && status <= CONVPOOL_CUDA_ERROR, std::string(function) + ": status " + std::to_string(status));
    expect(status == CONVPOOL_OK || convpool_last_error()[0] != '\0', std::string(function) + ": refused without a message");
    return status == CONVPOOL_OK;
}

class Fuzzer {
public:
    explicit Fuzzer(unsigned seed) : random_(seed) {}
    void round();

private:
    int below(int bound) { return int(random_() % unsigned(bound)); }
    bool one_in(int count) { return below(count) == 0; }
    int32_t number();
    convpool_problem legal();
    // Its bytes on the heap, no more of them than its struct_size says, some of them changed.
    std::vector<unsigned char> hostile(const void *data, size_t size);
    int32_t tactic();
    void *pointer();
    convpool_tensors tensors();
    void queries(const convpool_problem *p);
    void plans(const convpool_problem *p);

    std::mt19937 random_;
};

int32_t Fuzzer::number() {
    static const int32_t kNumbers[] = {0, 1, -1, 2, 3, 7, 8, 255, 256, 4096, 65535, 65536, 1 << 20, INT32_MAX, INT32_MIN, -2};
    return one_in(4) ? int32_t(random_()) : kNumbers[below(sizeof kNumbers / sizeof *kNumbers)];
}

convpool_problem Fuzzer::legal() {
    convpool_problem p{};
    p.struct_size = sizeof p;
    p.rank = 1 + below(3);
    p.w_dtype = below(5);
    const bool small = p.w_dtype == CONVPOOL_I8 || p.w_dtype == CONVPOOL_F8E4M3;
    p.x_dtype = !small && one_in(4) ? int32_t(CONVPOOL_F32) : p.w_dtype;
    p.y_dtype = small ? below(3) : p.w_dtype;
    p.has_w_scale = small && one_in(2);
    p.x_layout = below(2), p.y_layout = below(2);
    p.allow_tf32 = below(2), p.accumulation = below(2);
    p.n = 1 + below(4), p.c = 1 + below(300), p.m = 1 + below(300);
    for (int i = 0; i < p.rank; ++i) {
        p.kernel[i] = 1 + below(4), p.pool_kernel[i] = 1 + below(3);
        p.spatial[i] = p.kernel[i] + p.pool_kernel[i] + below(60);
        p.strides[i] = 1 + below(2), p.pool_strides[i] = 1 + below(2);
        p.dilations[i] = p.pool_dilations[i] = 1;
    }
    for (int i = 0; i < 2 * p.rank; ++i) p.pads[i] = below(2), p.pool_pads[i] = below(p.pool_kernel[i % p.rank]);
    if (one_in(4)) {  // upsampled instead of pooled
        for (int i = 0; i < p.rank; ++i) p.upsample[i] = below(5), p.pool_kernel[i] = p.pool_strides[i] = 1;
        for (int32_t &pad : p.pool_pads) pad = 0;
    }
    p.group = 1;
    p.has_bias = below(2), p.has_residual = below(2);
    p.activation = below(6), p.beta = 1;
    if (!small) p.prologue_affine = below(4), p.prologue_activation = below(3);
    if (p.prologue_affine == 3) p.prologue_groups = 1 + below(2), p.prologue_epsilon = 0.5f;
    return p;
}

std::vector<unsigned char> Fuzzer::hostile(const void *data, size_t size) {
    std::vector<unsigned char> bytes(static_cast<const unsigned char *>(data), static_cast<const unsigned char *>(data) + size);
    for (int changes = below(4); changes > 0; --changes) {
        const int32_t value = number();
        std::memcpy(&bytes[4 * below(int(size / 4))], &value, 4);
    }
    if (one_in(8)) bytes.resize(4 + below(int(size) + 64));
    const uint32_t all = uint32_t(bytes.size());
    if (!one_in(8)) std::memcpy(bytes.data(), &all, 4);  // else whatever it says now, of which no more may be read than there is
    uint32_t said;
    std::memcpy(&said, bytes.data(), 4);
    if (said > all) std::memcpy(bytes.data(), &all, 4);
    bytes.shrink_to_fit();
    return bytes;
}

int32_t Fuzzer::tactic() {
    static const std::vector<convpool_tactic_info> tactics = [] {
        std::vector<convpool_tactic_info> all(convpool_tactics(nullptr, 0));
        all[0].struct_size = sizeof all[0];
        convpool_tactics(all.data(), int32_t(all.size()));
        return all;
    }();
    return one_in(8) ? number() : one_in(4) ? 0 : tactics[below(int(tactics.size()))].id;
}

void *Fuzzer::pointer() {
    const uintptr_t aligned = (uintptr_t(random_()) << 12) + (uintptr_t{1} << 40);
    return one_in(16) ? nullptr : reinterpret_cast<void *>(aligned + (one_in(4) ? below(256) : 0));
}

convpool_tensors Fuzzer::tensors() {
    convpool_tensors t{};
    t.struct_size = sizeof t;
    t.flags = one_in(8) ? random_() : uint32_t(below(2));
    t.x = pointer(), t.w = pointer(), t.b = pointer(), t.residual = pointer(), t.y = pointer();
    t.scale = pointer(), t.shift = pointer(), t.workspace = pointer();
    t.w_scale = static_cast<const float *>(pointer());
    t.workspace_bytes = one_in(2) ? SIZE_MAX / 2 : random_();
    if (one_in(4)) t.prepared = pointer(), t.prepared_bytes = random_();
    return t;
}

void Fuzzer::queries(const convpool_problem *p) {
    int64_t out[CONVPOOL_MAX_RANK] = {1, 1, 1};
    const bool legal = ok(convpool_output_shape(p, out), "convpool_output_shape");
    expect(!legal || (out[0] > 0 && out[1] > 0 && out[2] > 0), "convpool_output_shape: a size below 1");
    const int32_t id = tactic(), cc = one_in(2) ? 0 : number(), shared_bytes = one_in(2) ? 232448 : number();
    ok(convpool_supports(p, id, cc, shared_bytes), "convpool_supports");
    size_t workspace = 0, prepared = 0;
    if (ok(convpool_workspace_bytes(p, id, &workspace), "convpool_workspace_bytes")) {
        expect(ok(convpool_prepared_bytes(p, id, &prepared), "convpool_prepared_bytes"), convpool_last_error());
        expect(prepared <= workspace, "convpool_prepared_bytes: more than the workspace");
    }
    int32_t chosen = 0;
    if (ok(convpool_default_tactic(p, 90, 132, 232448, random_(), &chosen), "convpool_default_tactic"))
        expect(ok(convpool_supports(p, chosen, 90, 232448), "convpool_supports"), convpool_last_error());
    else expect(!legal || p->prologue_affine == 3, "convpool_default_tactic: none for a legal problem");
    ok(convpool_prepare(p, id), "convpool_prepare");
}

void Fuzzer::plans(const convpool_problem *p) {
    const convpool_tensors given = tensors();
    const std::vector<unsigned char> changed = hostile(&given, sizeof given);
    const void *const any = one_in(2) ? static_cast<const void *>(&given) : changed.data();
    const auto *const t = static_cast<const convpool_tensors *>(any);
    ok(convpool_launch(p, tactic(), one_in(16) ? nullptr : t, nullptr), "convpool_launch");
    convpool_plan *plan = nullptr;
    const size_t most = one_in(4) ? random_() : SIZE_MAX;
    const uint32_t flags = one_in(8) ? random_() : uint32_t(below(2));
    if (!ok(convpool_plan_create(p, tactic(), most, flags, &plan), "convpool_plan_create")) {
        expect(plan == nullptr, "convpool_plan_create: a plan after a failure");
        return;
    }
    const std::unique_ptr<convpool_plan, void (*)(convpool_plan *)> owner(plan, convpool_plan_destroy);
    convpool_plan_properties properties{};
    properties.struct_size = sizeof properties;
    expect(ok(convpool_plan_info(plan, &properties), "convpool_plan_info"), convpool_last_error());
    expect(properties.workspace_bytes <= most, "convpool_plan_info: more workspace than was allowed");
    ok(convpool_plan_launch(plan, one_in(16) ? nullptr : t, nullptr), "convpool_plan_launch");
}

void Fuzzer::round() {
    const convpool_problem problem = legal();
    const std::vector<unsigned char> changed = hostile(&problem, sizeof problem);
    const void *const bytes = changed.data();
    const auto *const p = one_in(64) ? nullptr : static_cast<const convpool_problem *>(bytes);
    queries(p);
    plans(p);
}

}  // namespace

int main(int count, char **arguments) {
    if (count != 3) return std::printf("usage: convpool_fuzz_c_api SEED ROUNDS\n"), 2;
    const unsigned first = unsigned(std::strtoul(arguments[1], nullptr, 10)), rounds = unsigned(std::atoi(arguments[2]));
    pretended_set_device(0, 1);
    for (unsigned seed = first; seed != first + rounds; ++seed) try {
            Fuzzer(seed).round();
        } catch (const std::exception &error) {
            return std::printf("seed %u: %s\n", seed, error.what()), 1;
        }
    std::printf("%u rounds from seed %u, 0 failed\n", rounds, first);
    return 0;
}
