// SPDX-License-Identifier: Apache-2.0
// The declarations that v2.h and v3.h share, each in its own namespace, where Size is the type of a dimension. No include guard.

// Of the enumerations what the adapters and their tests name.
enum class DataType : int32_t { kFLOAT = 0, kHALF = 1, kINT8 = 2, kINT32 = 3, kBF16 = 7 };
enum class TensorFormat : int32_t { kLINEAR = 0, kCHW2 = 1, kHWC8 = 2, kCHW16 = 4, kCHW32 = 5, kDHWC8 = 6, kHWC = 8 };
enum class PluginFieldType : int32_t { kFLOAT32 = 1, kINT32 = 5, kINT64 = 10 };
enum class DimensionOperation : int32_t { kSUM = 0, kPROD = 1, kFLOOR_DIV = 7 };

struct Dims {
    int32_t nbDims;
    Size d[8];
};

struct PluginTensorDesc {
    Dims dims;
    DataType type;
    TensorFormat format;
    float scale;
};

struct PluginField {
    char const *name;
    void const *data;
    PluginFieldType type;
    int32_t length;
};

struct PluginFieldCollection {
    int32_t nbFields;
    PluginField const *fields;
};

// The expression classes are called, never implemented here; their methods forward to *impl_, whose virtual functions
// these are.
class IDimensionExpr;

class VDimensionExpr {
public:
    virtual ~VDimensionExpr() noexcept = default;
    virtual bool isConstant() const = 0;
    virtual Size getConstantValue() const = 0;
};

class VExprBuilder {
public:
    virtual ~VExprBuilder() noexcept = default;
    virtual IDimensionExpr const *constant(Size value) = 0;
    virtual IDimensionExpr const *operation(DimensionOperation op, IDimensionExpr const &first, IDimensionExpr const &second) = 0;
};

class IDimensionExpr {
public:
    bool isConstant() const noexcept { return impl_->isConstant(); }
    Size getConstantValue() const noexcept { return impl_->getConstantValue(); }
    virtual ~IDimensionExpr() noexcept = default;

protected:
    VDimensionExpr *impl_ = nullptr;
};

class IExprBuilder {
public:
    IDimensionExpr const *constant(Size value) noexcept { return impl_->constant(value); }
    IDimensionExpr const *operation(DimensionOperation op, IDimensionExpr const &first, IDimensionExpr const &second) noexcept {
        return impl_->operation(op, first, second);
    }
    virtual ~IExprBuilder() noexcept = default;

protected:
    VExprBuilder *impl_ = nullptr;
};

struct DimsExprs {
    int32_t nbDims;
    IDimensionExpr const *d[8];
};
