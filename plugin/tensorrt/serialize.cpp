// SPDX-License-Identifier: Apache-2.0

#include "serialize.h"

namespace convpool::tensorrt {
namespace {

static_assert(sizeof(Grant) == 24 + sizeof(convpool_problem), "no padding: it is written as it stands");

// The last letter is the format's number: another one is refused.
constexpr char kMagic[4] = {'C', 'P', 'A', '5'};
constexpr int32_t kFieldTypes[] = {5, 1};  // TensorRT's numbers of int32 and float fields

[[noreturn]] void fail(const std::string &what) { throw std::invalid_argument("serialised layer" + what); }

// CRC-32 of IEEE 802.3, as zlib's.
uint32_t checksum(const char *data, size_t length) {
    uint32_t crc = ~0u;
    for (size_t i = 0; i < length; ++i) {
        crc ^= static_cast<unsigned char>(data[i]);
        for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0u);
    }
    return ~crc;
}

template <typename T> void put(std::vector<char> &bytes, const T &value) {
    const char *from = reinterpret_cast<const char *>(&value);
    bytes.insert(bytes.end(), from, from + sizeof value);
}

class Reader {
public:
    Reader(const void *data, size_t length) : data_(static_cast<const char *>(data)), left_(length) {}
    template <typename T> T get() {
        if (data_ == nullptr || left_ < sizeof(T))
            fail("; got " + std::to_string(left_) + " bytes, expected " + std::to_string(sizeof(T)) +
                 " or more; the engine is damaged");
        T value;
        std::memcpy(&value, data_, sizeof value);
        data_ += sizeof value;
        left_ -= sizeof value;
        return value;
    }
    size_t left() const { return left_; }

private:
    const char *data_;
    size_t left_;
};

// Leaves out the operator's name: its creator is handed only what is of that operator.
PluginCore read_core(const Operator &op, Reader &reader) {
    std::vector<std::vector<int32_t>> values(op.attributes().size());
    std::vector<Field> fields;
    for (size_t a = 0; a < values.size(); ++a) {
        const int32_t count = reader.get<int32_t>();
        if (count < 0 || count > 2 * CONVPOOL_MAX_RANK) fail(": values; got " + std::to_string(count) + ", expected 0 to 6");
        for (int32_t i = 0; i < count; ++i) values[a].push_back(reader.get<int32_t>());
        const Attribute &attribute = op.attributes()[a];
        fields.push_back({attribute.name, values[a].data(), kFieldTypes[attribute.real], count});
    }
    return PluginCore(op, fields.data(), static_cast<int32_t>(fields.size()));
}

// enqueue hands the C API what is here as the size of TensorRT's workspace, so it is checked as if it were not believed.
void check_grant(const PluginCore &core, const Grant &grant) {
    try {
        const Grant none;
        if (grant.inputs == 0 && std::memcmp(&grant, &none, sizeof grant) != 0)
            throw std::invalid_argument("workspace or problem of a plugin that was never configured");
        if (grant.inputs == 0) return;
        core.check_problem(grant.largest, grant.inputs);
        if (grant.device.cc < 1) refuse("compute capability", std::to_string(grant.device.cc), "that of the builder's device");
        const int64_t most = static_cast<int64_t>(most_workspace_bytes(grant.largest, grant.device));
        if (grant.bytes < 0 || grant.bytes > most)
            refuse("workspace", std::to_string(grant.bytes) + " bytes",
                   "0 to " + std::to_string(most) + ", the most of any tactic");
    } catch (const std::exception &error) {
        fail(std::string(": ") + error.what() + "; the engine is damaged or from another version, build it anew");
    }
}

}  // namespace

std::vector<char> to_bytes(const PluginCore &core, const Grant &grant) {
    std::vector<char> bytes;
    put(bytes, kMagic);
    for (const std::vector<int32_t> &values : core.values()) {
        put(bytes, static_cast<int32_t>(values.size()));
        for (int32_t value : values) put(bytes, value);
    }
    put(bytes, grant);
    put(bytes, checksum(bytes.data(), bytes.size()));
    return bytes;
}

std::pair<PluginCore, Grant> from_bytes(const Operator &op, const void *data, size_t length) {
    Reader reader(data, length);
    for (char letter : kMagic)
        if (reader.get<char>() != letter) fail(": no such data; the engine is from another version, build it anew");
    if (reader.left() < sizeof(uint32_t)) fail("; got " + std::to_string(length) + " bytes; the engine is damaged");
    const size_t summed = length - sizeof(uint32_t);
    uint32_t stored = 0;
    std::memcpy(&stored, static_cast<const char *>(data) + summed, sizeof stored);
    if (stored != checksum(static_cast<const char *>(data), summed))
        fail(": checksum of " + std::to_string(length) + " bytes; got another than the stored one; the engine is damaged");
    PluginCore core = read_core(op, reader);
    const Grant grant = reader.get<Grant>();
    if (reader.left() != sizeof stored)
        fail("; got " + std::to_string(reader.left()) +
             " bytes behind the problem, expected 4; the engine is from another version, build it anew");
    check_grant(core, grant);
    return {std::move(core), grant};
}

}  // namespace convpool::tensorrt
