// The library's face: plain C, called by `refold.gpu.native` through ctypes. What a model's numbers are is its own affair.
#include "model.h"

#define REFOLD_API extern "C" __attribute__((visibility("default")))

struct AnyModel {
    Model<float, float>* float32;
    Model<BFloat16, BFloat16>* bfloat16;
    Model<Int8, BFloat16>* int8;
};

enum Kind { FLOAT32, BFLOAT16, INT8 };

// With `kind` INT8 the embedding and the cache are bfloat16. What is handed over must outlive the model. Null: no memory.
REFOLD_API AnyModel* refold_create(const Shape* shape, int kind, const float* cosines, const float* sines, const void* embedding, void* cache) {
    AnyModel* model = static_cast<AnyModel*>(std::calloc(1, sizeof(AnyModel)));
    if (!model) return nullptr;
    const BFloat16* narrow = static_cast<const BFloat16*>(embedding);
    if (kind == INT8) model->int8 = new Model<Int8, BFloat16>(*shape, cosines, sines, narrow, static_cast<BFloat16*>(cache));
    else if (kind == BFLOAT16) model->bfloat16 = new Model<BFloat16, BFloat16>(*shape, cosines, sines, narrow, static_cast<BFloat16*>(cache));
    else model->float32 = new Model<float, float>(*shape, cosines, sines, static_cast<const float*>(embedding), static_cast<float*>(cache));
    return model;
}

template <typename Job>
static auto with(AnyModel* model, Job job) {
    return model->int8 ? job(*model->int8) : model->bfloat16 ? job(*model->bfloat16) : job(*model->float32);
}

REFOLD_API int refold_set_weight(AnyModel* model, int layer, int kind, const float* data) {
    return with(model, [&](auto& one) { return one.set_weight(layer, kind, data); });
}

REFOLD_API int refold_run(AnyModel* model, const Step* step) {
    return with(model, [&](auto& one) { return one.run(*step); });
}

REFOLD_API int refold_threads(AnyModel* model) {
    return with(model, [](auto& one) { return one.threads(); });
}

REFOLD_API void refold_free(AnyModel* model) {
    delete model->int8;
    delete model->bfloat16;
    delete model->float32;
    std::free(model);
}
