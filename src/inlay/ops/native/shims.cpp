// The functions that compiled pieces call, with tensors of torch's C interface.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <functional>
#include <initializer_list>
#include <numeric>
#include <tuple>

#include "attention.h"
#include "packed_linear.h"

extern "C" {
int32_t inlay_packed_linear(const void*, const uint8_t*, const void*, void*, int32_t, int32_t, int64_t, int64_t,
                            int64_t, int64_t, int32_t, int32_t, int32_t);
int32_t inlay_mixed_linear(const void*, const uint8_t*, int64_t, const void*, void*, int32_t, int32_t, int64_t, int64_t,
                           int64_t, int32_t);
int32_t inlay_packed_embedding(const uint8_t*, const int64_t*, void*, int32_t, int64_t, int64_t, int64_t, int64_t,
                               int32_t, int32_t);
int32_t inlay_cached_attention(const inlay::Attention*);
int32_t inlay_expert_linear(const void*, const int64_t*, const void*, void*, int32_t, int32_t, int64_t, int64_t,
                            int64_t, int64_t, int64_t, const int64_t*);
}

namespace {

struct Tensor {
  void* data;
  int64_t dim, *sizes, *strides;
  int32_t dtype;
  explicit Tensor(AtenTensorHandle handle) {
    aoti_torch_get_data_ptr(handle, &data);
    aoti_torch_get_dim(handle, &dim);
    aoti_torch_get_sizes(handle, &sizes);
    aoti_torch_get_strides(handle, &strides);
    aoti_torch_get_dtype(handle, &dtype);
  }
  bool contiguous() const {
    int64_t step = 1;
    for (int64_t axis = dim - 1; axis >= 0; --axis) {
      if (sizes[axis] != 1 && strides[axis] != step) return false;
      step *= sizes[axis];
    }
    return true;
  }
  bool has_shape(std::initializer_list<int64_t> wanted) const {
    return dim == static_cast<int64_t>(wanted.size()) && std::equal(wanted.begin(), wanted.end(), sizes);
  }
  int64_t count() const { return std::accumulate(sizes, sizes + dim, int64_t{1}, std::multiplies<int64_t>()); }
  // Whether these are contiguous int64 indices.
  bool has_indices() const { return dtype == aoti_torch_dtype_int64() && contiguous(); }
  int32_t type() const {
    return dtype == aoti_torch_dtype_float32()    ? inlay::kFloat32
           : dtype == aoti_torch_dtype_bfloat16() ? inlay::kBFloat16
           : dtype == aoti_torch_dtype_float16()  ? inlay::kFloat16
                                                  : -1;
  }
};

AOTITorchError refused(const char* what) {
  inlay::note_error(what);
  return AOTI_TORCH_FAILURE;
}

// Converts the return value of a kernel; if it failed, its result is deleted.
AOTITorchError done(int32_t failed, AtenTensorHandle* result) {
  if (!failed) return AOTI_TORCH_SUCCESS;
  aoti_torch_delete_tensor_object(*result);
  return AOTI_TORCH_FAILURE;
}

AOTITorchError made(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype, AtenTensorHandle* out) {
  return aoti_torch_empty_strided(dim, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, out);
}

constexpr int64_t kMostAxes = 16;

// Whether a packed weight has the shape for these features and columns.
bool holds(const Tensor& weight, int64_t features, int64_t depth, int64_t group, int64_t bits, int64_t zero) {
  if (group <= 0 || features < 0) return false;
  inlay::Linear l{};
  l.features = features, l.depth = depth, l.group = group;
  l.bits = static_cast<int32_t>(bits), l.zero = static_cast<int32_t>(zero);
  return weight.has_shape({l.blocks(), l.groups(), l.group_bytes()});
}

// Copies rows that are not contiguous.
const void* gathered(const Tensor& x, int64_t rows, int64_t depth) {
  thread_local inlay::Scratch scratch;
  const int64_t size = x.type() == inlay::kFloat32 ? 4 : 2, stride = x.strides[x.dim - 1];
  char* out = scratch.get<char>(rows * depth * size);
  for (int64_t row = 0; row < rows; ++row) {
    int64_t from = 0, left = row;
    for (int64_t axis = x.dim - 2; axis >= 0; --axis) {
      from += left % x.sizes[axis] * x.strides[axis];
      left /= x.sizes[axis];
    }
    const char* at = static_cast<const char*>(x.data) + from * size;
    if (stride == 1)
      std::memcpy(out + row * depth * size, at, depth * size);
    else
      for (int64_t k = 0; k < depth; ++k) std::memcpy(out + (row * depth + k) * size, at + k * stride * size, size);
  }
  return out;
}

}  // namespace

INLAY_EXPORT AOTITorchError INLAY_SHIM(packed_linear)(AtenTensorHandle x_, AtenTensorHandle weight_,
                                                      AtenTensorHandle* bias_, int64_t features, int64_t bits,
                                                      int64_t zero, int64_t singly, int64_t tiled,
                                                      AtenTensorHandle* ret0) {
  Tensor x(x_), weight(weight_);
  if (x.type() < 0 || !weight.contiguous() || x.dim < 1 || x.dim > kMostAxes || weight.dim != (bits ? 3 : 1))
    return refused("packed_linear wants x in float32, bfloat16 or float16, and a packed weight that is contiguous");
  int64_t sizes[kMostAxes], strides[kMostAxes], rows = 1, depth = x.sizes[x.dim - 1], step = features;
  if (bits && !holds(weight, features, depth, weight.sizes[1] ? depth / weight.sizes[1] : 0, bits, zero))
    return refused("packed_linear: the weight has not the shape that its features, columns and bits have packed");
  if (bias_) {
    const Tensor bias(*bias_);
    if (bias.dtype != x.dtype || !bias.contiguous() || !bias.has_shape({features}))
      return refused("packed_linear wants a bias in the number format of x, one for each feature");
  }
  for (int64_t axis = x.dim - 2; axis >= 0; --axis) {
    sizes[axis] = x.sizes[axis], strides[axis] = step;
    step *= x.sizes[axis], rows *= x.sizes[axis];
  }
  sizes[x.dim - 1] = features, strides[x.dim - 1] = 1;
  if (AOTITorchError error = made(x.dim, sizes, strides, x.dtype, ret0)) return error;
  const void* bias = bias_ ? Tensor(*bias_).data : nullptr;
  void* y = Tensor(*ret0).data;
  const void* data = x.data;
  if (!x.contiguous() && inlay::guarded([&] { data = gathered(x, rows, depth); })) return done(1, ret0);
  const int32_t way = rows <= singly ? inlay::kDot : rows <= tiled ? inlay::kTiles8 : inlay::kTiles16;
  const uint8_t* bytes = static_cast<const uint8_t*>(weight.data);
  if (!bits)
    return done(
        inlay_mixed_linear(data, bytes, weight.count(), bias, y, x.type(), x.type(), rows, features, depth, way), ret0);
  const int32_t failed =
      inlay_packed_linear(data, bytes, bias, y, x.type(), x.type(), rows, features, depth, depth / weight.sizes[1],
                          static_cast<int32_t>(bits), static_cast<int32_t>(zero), way);
  return done(failed, ret0);
}

INLAY_EXPORT AOTITorchError INLAY_SHIM(packed_embedding)(AtenTensorHandle weight_, AtenTensorHandle tokens_,
                                                         int64_t features, int64_t bits, int64_t zero, int64_t group,
                                                         int32_t dtype, AtenTensorHandle* ret0) {
  Tensor weight(weight_), tokens(tokens_);
  if (!tokens.has_indices() || !weight.contiguous() || tokens.dim >= kMostAxes || weight.dim != 3)
    return refused("packed_embedding wants a packed weight and tokens in int64, both contiguous");
  if (dtype != aoti_torch_dtype_float32() && dtype != aoti_torch_dtype_bfloat16() &&
      dtype != aoti_torch_dtype_float16())
    return refused("packed_embedding gives float32, bfloat16 or float16");
  if (!holds(weight, features, weight.sizes[1] * group, group, bits, zero))
    return refused("packed_embedding: the weight has not the shape that its features and bits have packed");
  int64_t sizes[kMostAxes], strides[kMostAxes], count = 1, depth = weight.sizes[1] * group, step = depth;
  for (int64_t axis = tokens.dim - 1; axis >= 0; --axis) {
    sizes[axis] = tokens.sizes[axis], strides[axis] = step;
    step *= tokens.sizes[axis], count *= tokens.sizes[axis];
  }
  sizes[tokens.dim] = depth, strides[tokens.dim] = 1;
  if (AOTITorchError error = made(tokens.dim + 1, sizes, strides, dtype, ret0)) return error;
  Tensor out(*ret0);
  const int32_t failed = inlay_packed_embedding(
      static_cast<const uint8_t*>(weight.data), static_cast<const int64_t*>(tokens.data), out.data, out.type(), count,
      features, depth, group, static_cast<int32_t>(bits), static_cast<int32_t>(zero));
  return done(failed, ret0);
}

INLAY_EXPORT AOTITorchError INLAY_SHIM(expert_linear)(AtenTensorHandle x_, AtenTensorHandle experts_,
                                                      AtenTensorHandle weight_, AtenTensorHandle* ret0) {
  Tensor x(x_), experts(experts_), weight(weight_);
  const int64_t dim = experts.dim, last = dim - 1;
  if (x.type() < 0 || weight.type() < 0 || weight.dim != 3 || !experts.has_indices())
    return refused("expert_linear wants float32, bfloat16 or float16, and contiguous experts in int64");
  if (dim < 1 || dim >= kMostAxes || x.dim != dim + 1 || x.sizes[dim] != weight.sizes[2] ||
      !std::equal(x.sizes, x.sizes + last, experts.sizes) ||
      (x.sizes[last] != experts.sizes[last] && x.sizes[last] != 1))
    return refused("expert_linear wants rows of the columns of the weight, for each token or for each of its experts");
  int64_t sizes[kMostAxes], strides[kMostAxes], step = weight.sizes[1];
  const int64_t rows = experts.count(), shared = x.sizes[last] == 1 ? experts.sizes[last] : 1, depth = x.sizes[dim];
  for (int64_t axis = last; axis >= 0; --axis) {
    sizes[axis] = experts.sizes[axis], strides[axis] = step;
    step *= experts.sizes[axis];
  }
  sizes[dim] = weight.sizes[1], strides[dim] = 1;
  if (AOTITorchError error = made(dim + 1, sizes, strides, x.dtype, ret0)) return error;
  const void* data = x.data;
  if (!x.contiguous() && shared && inlay::guarded([&] { data = gathered(x, rows / shared, depth); }))
    return done(1, ret0);
  const int32_t failed = inlay_expert_linear(data, static_cast<const int64_t*>(experts.data), weight.data,
                                             Tensor(*ret0).data, x.type(), weight.type(), rows, shared ? shared : 1,
                                             weight.sizes[0], weight.sizes[1], depth, weight.strides);
  return done(failed, ret0);
}

INLAY_EXPORT AOTITorchError INLAY_SHIM(cached_attention)(AtenTensorHandle query_, AtenTensorHandle keys_,
                                                         AtenTensorHandle values_, AtenTensorHandle slots_,
                                                         AtenTensorHandle lengths_, double scale, int64_t window,
                                                         double softcap, AtenTensorHandle* slopes_,
                                                         AtenTensorHandle* sinks_, int32_t tiled,
                                                         AtenTensorHandle* ret0) {
  Tensor query(query_), keys(keys_), values(values_), slots(slots_), lengths(lengths_);
  if (query.dim != 4 || keys.dim != 4 || values.dim != 4 || (query.sizes[3] > 1 && query.strides[3] != 1) ||
      !keys.contiguous() || !values.contiguous() || query.type() < 0 || keys.type() < 0 || keys.dtype != values.dtype)
    return refused("cached_attention wants float32, bfloat16 or float16, caches that are contiguous and rows that are");
  const int64_t batch = query.sizes[0], heads = query.sizes[1], length = query.sizes[2], width = values.sizes[3];
  if (!keys.has_shape({values.sizes[0], values.sizes[1], values.sizes[2], query.sizes[3]}))
    return refused("cached_attention: keys, values and queries do not have the same slots, heads, rows or columns");
  if (!slots.has_indices() || !lengths.has_indices() || !slots.has_shape({batch}) || !lengths.has_shape({batch}))
    return refused("cached_attention wants one slot and one length for each sequence, in int64");
  const int64_t sizes[4] = {batch, heads, length, width};
  const int64_t strides[4] = {length * heads * width, width, heads * width, 1};
  inlay::Attention a{};
  for (auto [handle, place, type] :
       {std::tuple{slopes_, &a.slopes, &a.slopes_type}, std::tuple{sinks_, &a.sinks, &a.sinks_type}}) {
    if (!handle) continue;
    const Tensor extra(*handle);
    if (!extra.contiguous() || extra.type() < 0 || extra.count() != heads)
      return refused("cached_attention wants slopes and sinks in float32, bfloat16 or float16, one for each head");
    *place = extra.data, *type = extra.type();
  }
  if (AOTITorchError error = made(4, sizes, strides, query.dtype, ret0)) return error;
  a.query = query.data;
  a.q_batch = query.strides[0], a.q_head = query.strides[1], a.q_row = query.strides[2];
  a.keys = keys.data, a.values = values.data;
  a.slots = static_cast<const int64_t*>(slots.data), a.lengths = static_cast<const int64_t*>(lengths.data);
  a.out = Tensor(*ret0).data;
  a.q_type = query.type(), a.kv_type = keys.type();
  a.batch = batch, a.heads = heads, a.kv_heads = keys.sizes[1], a.length = length;
  a.depth = query.sizes[3], a.width = width, a.room = keys.sizes[2], a.held = keys.sizes[0];
  a.scale = static_cast<float>(scale), a.window = window, a.softcap = static_cast<float>(softcap), a.tiled = tiled;
  return done(inlay_cached_attention(&a), ret0);
}
